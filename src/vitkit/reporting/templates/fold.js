// Opens what is folded: around the place that a link names, and before printing.
const unfold = () => {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = place?.closest("details:not([open])");
  if (fold) {
    fold.open = true;
    place.scrollIntoView();
  }
};
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
});
unfold();
