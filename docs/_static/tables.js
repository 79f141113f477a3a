/* Which tables sort and filter, and by what: words are chosen from a list, numbers are searched. */
document.addEventListener("DOMContentLoaded", () => {
  if (!window.DataTable) return;
  const words = ["GPU", "operator", "implementation", "size", "dtype", "call", "take", "take, by GPU time"];
  // What the form of the front page asks for, or what the site's search was asked for.
  const from = location.search || (/search\.html\?/.test(document.referrer) ? new URL(document.referrer).search : "");
  const asked = new URLSearchParams(from).getAll("q").join(" ").trim();
  document.querySelectorAll(".fb-sortable").forEach((box) => {
    const table = box.querySelector("table");
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const columns = heads.map((_, i) => i);
    const lists = columns.filter((i) => words.includes(heads[i]));
    const clocks = columns.filter((i) => !words.includes(heads[i]));
    const caption = table.caption.textContent;
    new DataTable(table, {
      paging: false,
      order: [],
      search: { search: asked },
      autoWidth: false,
      orderCellsTop: true,
      columnDefs: [{ targets: lists, className: "fb-wraps", columnControl: ["order", ["searchList"]] },
                   { targets: clocks, className: "fb-number", columnControl: ["order", ["search"]] }],
      ordering: { indicators: false, handler: true },
      layout: {
        topStart: { buttons: [{ extend: "colvis", text: "Clocks", columns: clocks },
                              { extend: "csv", text: "CSV", filename: "fusebook", title: null }] },
        topEnd: { search: { placeholder: "softmax 128256", text: "Search" } },
        bottomStart: "info",
        bottomEnd: null,
      },
      language: { info: "_TOTAL_ of _MAX_ rows", infoFiltered: "" },
    });
    box.setAttribute("aria-label", caption);
  });
});
