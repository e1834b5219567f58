// What the pages of the checkpoint browser gain with a script: search as one types, folding in place, values under the pointer,
// scans that show their progress, keys. Every page works without it.
"use strict";
(() => {
  const $ = (s, e = document) => e.querySelector(s);
  const $$ = (s, e = document) => [...e.querySelectorAll(s)];
  const body = document.body;

  // ----- light and dark
  const stored = (() => { try { return localStorage.getItem("mt-theme"); } catch { return null; } })();
  if (stored === "light" || stored === "dark") body.dataset.theme = stored;
  function toggleTheme() {
    const dark = body.dataset.theme ? body.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    body.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("mt-theme", body.dataset.theme); } catch { /* a private window forgets */ }
  }
  $("[data-theme-button]")?.addEventListener("click", toggleTheme);
  $("[data-keys]")?.addEventListener("click", () => $("#keys").showModal());

  // ----- fragments: markup that this server has escaped
  async function fragment(url) {
    const answer = await fetch(url, { credentials: "same-origin" });
    const holder = document.createElement("template");
    holder.innerHTML = await answer.text();
    return { ok: answer.ok, nodes: holder.content };
  }
  const plus = (url, pair) => url + (url.includes("?") ? "&" : "?") + pair;

  for (const part of $$("[data-load]")) {
    fragment(plus(part.dataset.load, "fragment=1")).then(({ nodes }) => { part.replaceWith(nodes); poll(); });
  }

  // ----- work in the background
  let polling = false;
  async function poll() {
    const here = $("[data-poll]");
    if (!here || polling) return;
    polling = true;
    await new Promise((done) => setTimeout(done, Number(here.dataset.every) || 400));
    try {
      const holder = here.closest("[data-swap]") || here.closest(".mt-section") || here;
      const { nodes } = await fragment(plus(here.dataset.poll, here.dataset.poll.includes("fragment=") ? "again=" : "fragment=1"));
      const scroll = window.scrollY;
      holder.replaceWith(nodes);
      window.scrollTo(0, scroll);
    } finally { polling = false; }
    poll();
  }
  poll();

  // ----- the list: search while typing
  const form = $("form.mt-filter[role=search]");
  const listing = $("#listing");
  let turn = 0, waiting = 0;
  async function search() {
    const mine = ++turn;
    const query = new URLSearchParams(new FormData(form));
    for (const [k, v] of [...query]) if (v === "" || (k === "sort" && v === "tree")) query.delete(k);
    const url = "checkpoint?" + query;
    const { nodes } = await fragment(plus(url, "fragment=1"));
    if (mine !== turn) return; // a later key has overtaken this answer
    listing.replaceChildren(nodes);
    history.replaceState(null, "", url);
    cursor = -1;
  }
  if (form && listing) {
    form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
    form.addEventListener("submit", (e) => { e.preventDefault(); search(); });
  }

  // ----- groups fold and unfold in place
  async function fold(button) {
    const row = button.closest("tr");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) {
      let next = row.nextElementSibling;
      const depth = depthOf(row);
      while (next && depthOf(next) > depth) { const gone = next; next = next.nextElementSibling; gone.remove(); }
      return;
    }
    const { ok, nodes } = await fragment(button.dataset.unfold);
    if (ok && button.getAttribute("aria-expanded") === "true") {
      const depth = depthOf(row) + 1;
      for (const r of nodes.querySelectorAll("tr")) setDepth(r, depth);
      row.after(nodes);
    }
  }
  const depthOf = (row) => Number(/ n(\d)/.exec($("td", row)?.className || "")?.[1] || 0);
  function setDepth(row, depth) {
    const cell = $("td", row);
    cell.className = cell.className.replace(/ n\d/, "") + " n" + Math.min(depth, 9);
  }
  document.addEventListener("click", (e) => {
    const button = e.target.closest?.("[data-unfold]");
    if (button) { e.preventDefault(); fold(button); }
  });

  // ----- rows by keyboard
  let cursor = -1;
  const rows = () => $$("tr[data-row], .mt-table tbody tr").filter((r) => $("a", r));
  function walk(by) {
    const all = rows();
    if (!all.length) return;
    all[cursor]?.classList.remove("mt-here");
    const old = all.findIndex((r) => r.contains(document.activeElement));
    cursor = Math.max(0, Math.min(all.length - 1, (old >= 0 ? old : cursor) + by));
    all[cursor].classList.add("mt-here");
    $("a", all[cursor]).focus({ preventScroll: true });
    all[cursor].scrollIntoView({ block: "nearest" });
  }

  // ----- values under the pointer
  for (const cells of $$(".mt-cells[data-values]")) {
    const readout = cells.parentElement.querySelector(".mt-readout");
    const image = $("img", cells);
    const [height, width] = [Number(cells.dataset.rows), Number(cells.dataset.columns)];
    let data = null, asked = false, i = 0, j = 0;
    const mark = document.createElement("div");
    mark.className = "mt-cursor";
    mark.hidden = true;
    cells.append(mark);
    async function load() {
      if (asked) return;
      asked = true;
      const answer = await fetch(cells.dataset.values, { credentials: "same-origin" });
      if (answer.ok) { data = await answer.json(); if (!mark.hidden) show(); }
    }
    function show() {
      const [w, h] = [image.clientWidth / width, image.clientHeight / height];
      mark.hidden = false;
      mark.style.left = `${j * w}px`; mark.style.top = `${i * h}px`;
      mark.style.width = `${Math.max(w, 6)}px`; mark.style.height = `${Math.max(h, 6)}px`;
      if (!data) { load(); return; }
      const index = [...data.at];
      if (data.rows !== null) index[data.rows] = data.row_index[i];
      if (data.columns !== null) index[data.columns] = data.column_index[j];
      readout.textContent = index.length ? `[${index.join(", ")}] = ${data.values[i][j]}` : data.values[i][j];
    }
    cells.addEventListener("pointermove", (e) => {
      const box = image.getBoundingClientRect();
      j = Math.max(0, Math.min(width - 1, Math.floor(((e.clientX - box.left) / box.width) * width)));
      i = Math.max(0, Math.min(height - 1, Math.floor(((e.clientY - box.top) / box.height) * height)));
      show();
    });
    cells.addEventListener("pointerleave", () => { if (document.activeElement !== cells) mark.hidden = true; });
    cells.addEventListener("focus", show);
    cells.addEventListener("blur", () => { mark.hidden = true; });
    cells.addEventListener("keydown", (e) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key];
      if (!step || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      if (e.shiftKey) { $(`[data-pan="${e.key.slice(5).toLowerCase()}"]`)?.click(); return; }
      i = Math.max(0, Math.min(height - 1, i + step[0]));
      j = Math.max(0, Math.min(width - 1, j + step[1]));
      show();
    });
  }

  // ----- keys
  document.addEventListener("keydown", (e) => {
    const at = e.target;
    if (e.ctrlKey || e.metaKey || e.altKey || $("#keys")?.open) return;
    if (at.matches("input, select, textarea")) { if (e.key === "Escape") at.blur(); return; }
    const row = at.closest?.("tr");
    const button = row && $("[data-unfold]", row);
    const go = (selector) => { const a = $(selector); if (a) { e.preventDefault(); a.click(); } };
    switch (e.key) {
      case "/": { const s = $("input[type=search]"); if (s) { e.preventDefault(); s.focus(); s.select(); } break; }
      case "j": walk(1); break;
      case "k": walk(-1); break;
      case "ArrowDown": case "ArrowUp": if (row) { e.preventDefault(); walk(e.key === "ArrowDown" ? 1 : -1); } break;
      case "ArrowRight": if (button && button.getAttribute("aria-expanded") !== "true") { e.preventDefault(); fold(button); } break;
      case "ArrowLeft": if (button && button.getAttribute("aria-expanded") === "true") { e.preventDefault(); fold(button); } break;
      case "u": { const up = $("#main")?.dataset.up; if (up) location.href = up; break; }
      case "[": go(".mt-beside [rel=prev], .mt-pager [rel=prev]"); break;
      case "]": go(".mt-beside [rel=next], .mt-pager [rel=next]"); break;
      case "t": toggleTheme(); break;
      case "?": $("#keys").showModal(); break;
      default: if (/^[1-9]$/.test(e.key)) $$(".mt-tabs a")[Number(e.key) - 1]?.click();
    }
  });
})();
