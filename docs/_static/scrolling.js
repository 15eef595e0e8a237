/* What is wider than its column can be scrolled with the keyboard, in every browser. */
"use strict";

const WIDE = "article :is(pre, .table-wrapper, .layer-table, .formula-itself, .scroll)";

function makeReachable() {
  for (const box of document.querySelectorAll(WIDE)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

document.addEventListener("DOMContentLoaded", makeReachable);
addEventListener("load", makeReachable);
addEventListener("resize", makeReachable);
document.addEventListener("toggle", makeReachable, true); // a hidden cell is opened
