// Copies text, also where browsers offer no clipboard: to pages that came over plain HTTP from another machine.

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// A button that says for a moment that it has copied what `text` returns.
export function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    await copyText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}
