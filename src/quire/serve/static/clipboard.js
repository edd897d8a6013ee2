// Copy text, also on pages loaded over plain HTTP from another machine, where browsers offer no clipboard API.

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

// Make `button` copy the result of `text` and confirm it for a moment.
export function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    await copyText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}
