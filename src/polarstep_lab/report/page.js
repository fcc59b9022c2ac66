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
// Say of each table that is wider than its place that it goes on.
for (const place of document.querySelectorAll(".scroll")) {
  const mark = () => place.classList.toggle("wide", place.scrollWidth > place.clientWidth + 1);
  new ResizeObserver(mark).observe(place);
}
