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

// Make `button` copy the result of `text`, unless that is null, and confirm it for a moment.
export function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    const copied = text();
    if (copied === null) return;
    await copyText(copied);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

export function copyButton(text) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "plain", textContent: "Copy" });
  return copies(button, text);
}
