// Printed, a page is light and has nothing folded; tags can be reached without a mouse.
(() => {
  let folded = [], theme;
  addEventListener("beforeprint", () => {
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((part) => (part.open = true));
  });
  addEventListener("afterprint", () => {
    document.documentElement.dataset.theme = theme;
    folded.forEach((part) => (part.open = false));
  });

  // What an address names may lie in a fold.
  const show = () => {
    const there = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = there && there.closest("details:not([open])");
    if (fold) {
      fold.open = true;
      there.scrollIntoView();
    }
  };
  addEventListener("hashchange", show);

  // The search has no summary for a word of the index whose place holds no text, and would fail to show that.
  addEventListener("DOMContentLoaded", () => {
    if (typeof Search === "undefined" || !Search.makeSearchSummary) return;
    const summary = Search.makeSearchSummary;
    Search.makeSearchSummary = (...asked) => summary(...asked) ?? document.createElement("p");
  });
  addEventListener("load", () => {
    show();
    for (const tag of document.querySelectorAll(".sphx-glr-tag, #sphx-glr-tag-clear")) {
      tag.setAttribute("role", "button");
      tag.tabIndex = 0;
      tag.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          tag.click();
        }
      });
    }
  });
})();
