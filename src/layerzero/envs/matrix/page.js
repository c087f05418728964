// Arrow keys move over the map; everything else works without this script.
(() => {
  const rows = [...document.querySelectorAll(".map tbody tr")].map((row) => [...row.querySelectorAll("a.cell")]);
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  document.querySelector(".map")?.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    const row = rows.findIndex((cells) => cells.includes(document.activeElement));
    if (!step || row < 0) return;
    const column = rows[row].indexOf(document.activeElement);
    const next = rows[row + step[0]]?.[column + step[1]];
    if (next) { next.focus(); event.preventDefault(); }
  });
})();
