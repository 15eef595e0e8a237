// Saves the ticked labels as relabel.csv, together with those that the run was trained with.
const save = document.getElementById("save-labels");
if (save) {
  const boxes = Array.from(document.querySelectorAll(".suspects input[type=checkbox]"));
  const names = new Set(Array.from(document.querySelectorAll("#class-names option"), (one) => one.value));
  const earlier = Array.from(document.querySelectorAll("#earlier-labels li"), (one) => one.dataset);
  const wanted = (box) => box.closest("li").querySelector("input[type=text]");
  const cell = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const show = () => {
    const count = boxes.filter((box) => box.checked).length;
    const before = earlier.length ? `; ${earlier.length.toLocaleString("en")} from earlier` : "";
    document.getElementById("ticked").value = (count ? `${count} ticked` : "no label ticked") + before;
    save.disabled = !count;
  };
  for (const box of boxes) {
    box.addEventListener("change", show);
    wanted(box).addEventListener("input", () => {
      wanted(box).setCustomValidity("");
      box.checked = true;  // who writes a class means it
      show();
    });
  }
  save.addEventListener("click", () => {
    const rows = new Map(earlier.map(({ path, old, new: name }) => [path, [path, old, name]]));
    for (const box of boxes.filter((one) => one.checked)) {
      const field = wanted(box), name = field.value;
      if (!names.has(name)) {
        field.setCustomValidity(`${name || "an empty name"} is not a class of the data`);
        field.reportValidity();
        return;
      }
      const { path, old } = box.dataset;
      // the data have the label from before the earlier correction
      rows.set(path, [path, rows.has(path) ? rows.get(path)[1] : old, name]);
    }
    const lines = [["path", "old_class", "new_class"], ...rows.values()];
    const text = lines.map((line) => `${line.map(cell).join(",")}\n`).join("");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = "relabel.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  show();  // a browser that goes back keeps the ticks
}
