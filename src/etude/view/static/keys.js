// The keyboard, the theme and the list of keys.
(() => {
  const root = document.documentElement;
  const find = (selector) => document.querySelector(selector);

  function toggleTheme() {
    const dark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("etude-theme", root.dataset.theme); } catch { /* It holds for this page. */ }
    document.dispatchEvent(new Event("etude:theme"));
  }

  function move(step) {
    const rows = [...document.querySelectorAll("[data-row]")];
    const now = rows.findIndex((row) => row === document.activeElement || row.closest("tr,.card")?.contains(document.activeElement));
    const next = rows[Math.min(rows.length - 1, Math.max(0, now < 0 ? (step > 0 ? 0 : rows.length - 1) : now + step))];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  }

  // Of several, the last one: that of the innermost page.
  const follow = (selector) => [...document.querySelectorAll(selector)].at(-1)?.click();
  const keys = {
    j: () => move(1),
    k: () => move(-1),
    u: () => follow("[data-up]"),
    t: toggleTheme,
    "[": () => follow("[rel=prev]"),
    "]": () => follow("[rel=next]"),
    "/": () => find("input[type=search]")?.focus(),
    "?": () => find("#keys")?.showModal(),
  };
  let pending = 0;

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || find("dialog[open]")) return;
    if (event.target.closest("input:not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (Date.now() - pending < 1500) {
      pending = 0;
      follow(event.key === "r" ? ".home" : `[data-key="${CSS.escape(event.key)}"]`);
    } else if (event.key === "g") {
      pending = Date.now();
    } else if (keys[event.key]) {
      keys[event.key]();
    } else {
      return;
    }
    event.preventDefault();
  });
  // An address within a folded part opens it.
  function unfold() {
    const place = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!place) return;
    for (let part = place.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    place.scrollIntoView({ block: "nearest" });
  }
  addEventListener("hashchange", unfold);
  document.addEventListener("DOMContentLoaded", unfold);

  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-theme]") && event.target.closest("button")) toggleTheme();
    if (event.target.closest("[data-help]")) find("#keys").showModal();
  });
})();
