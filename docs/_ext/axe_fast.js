/* axe takes a minute for a page of code: it compares the colours of ten thousand words. Which colours meet is decided by
   the few ways that words look, so those rules see three elements of each look, in both themes, on the first pages that
   have it, and the others see a page whose code is not taken apart. Nothing is left out but repetitions. */
window.fast = (() => {
  const byColour = ["color-contrast", "link-in-text-block"];
  const options = { resultTypes: ["violations"], preload: false, elementRef: true };
  /* In code every word has a colour of its own, and a link among them needs no line. */
  const found = (result) => result.violations.map((v) => ({
    rule: v.id, impact: v.impact,
    nodes: v.nodes.filter((n) => !(v.id === "link-in-text-block" && n.element.closest(".highlight")))
      .map((n) => ({ target: n.target.join(" "), why: n.failureSummary.split("\n").slice(1).join(" ").trim() })),
  })).filter((v) => v.nodes.length);
  /* Single characters and marks like >>> may be drawings, and axe does not judge them. */
  const hasText = (element) =>
    [...element.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && /[\p{L}\p{N}].*[\p{L}\p{N}]/su.test(n.data));

  /* All that decides how the text of an element looks: its own style, and every background that it stands on. */
  const backgrounds = new Map();
  const behind = (element) => {
    if (!element) return "";
    if (!backgrounds.has(element)) {
      const style = getComputedStyle(element);
      const own = [style.backgroundColor, style.backgroundImage, style.opacity, style.filter].join();
      const above = behind(element.parentElement);
      backgrounds.set(element, own === "rgba(0, 0, 0, 0),none,1,none" ? above : `${above}/${own}`);
    }
    return backgrounds.get(element);
  };
  const look = (element) => {
    const style = getComputedStyle(element);
    const link = element.closest("a") ? getComputedStyle(element.closest("a").parentElement).color : "";
    const own = [style.color, style.fontSize, style.fontWeight, style.textShadow, style.textDecorationLine];
    return [element.tagName === "A", link, ...own, behind(element)].join("|");
  };

  /* Mark the first three visible elements of every look that the theme in force has, but of those that are known: axe
     passes by what it cannot tell, as where something lies over the text. Returns the looks that are marked. */
  const mark = (known) => {
    backgrounds.clear();
    const seen = new Map(known.map((key) => [key, Infinity]));
    for (const element of document.body.querySelectorAll("*")) {
      if (!hasText(element) || !element.checkVisibility({ visibilityProperty: true })) continue;
      const key = look(element);
      seen.set(key, (seen.get(key) ?? 0) + 1);
      if (seen.get(key) <= 3) element.dataset.look = "";
    }
    return [...seen.keys()].slice(known.length);
  };

  /* Rows of a table that differ only in words and in where links lead: the first three stand for all. */
  const shorten = () => {
    for (const body of document.querySelectorAll("tbody")) {
      const seen = new Map();
      for (const row of [...body.rows]) {
        const key = row.innerHTML.replace(/>[^<]*[^<\s][^<]*/g, ">x").replace(/(href|title|data-[\w-]+)="[^"]+"/g, '$1="x"');
        seen.set(key, (seen.get(key) ?? 0) + 1);
        if (seen.get(key) > 3 && !row.querySelector("[data-look], [id]")) row.remove();
      }
    }
  };

  const structure = async () => {
    shorten();
    for (const span of document.querySelectorAll(".highlight pre span:not([data-look])"))
      if (!span.childElementCount) span.replaceWith(span.textContent);
    const rules = Object.fromEntries(byColour.map((rule) => [rule, { enabled: false }]));
    return found(await axe.run(document, { ...options, rules }));
  };

  /* Keep what is marked, and what it stands in. */
  const prune = () => {
    for (const element of [...document.body.querySelectorAll("*")].reverse())
      if (element.dataset.look === undefined && !element.childElementCount) element.remove();
  };
  const colours = async () => found(await axe.run(document, { ...options, runOnly: byColour }));

  return { mark, structure, prune, colours };
})();
