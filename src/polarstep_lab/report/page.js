for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.closest(".command").querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Pages opened from disk may be denied the clipboard: select the text instead.
      const range = document.createRange();
      range.selectNodeContents(code);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
      return;
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
// Pointing at a row of a table brings its curve forward in the next figure.
for (const row of document.querySelectorAll("tr[data-series]")) {
  const scroll = row.closest(".scroll");
  let node = scroll.nextElementSibling;
  while (node && node.tagName !== "FIGURE") node = node.nextElementSibling;
  if (!node) continue;
  row.addEventListener("mouseenter", () => {
    node.classList.add("focused");
    for (const line of node.querySelectorAll(".series")) line.classList.toggle("on", line.dataset.series === row.dataset.series);
  });
  row.addEventListener("mouseleave", () => node.classList.remove("focused"));
}
