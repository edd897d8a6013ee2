// The button that changes the theme. theme.js applies the stored choice before the page is drawn.

// `redraw` is called after each change, for what CSS does not draw.
export function startTheme(redraw) {
  const root = document.documentElement;
  const label = () => (document.getElementById("theme-name").textContent = root.dataset.theme ?? "system");
  document.getElementById("theme").addEventListener("click", () => {
    const next = { light: "dark", dark: null }[root.dataset.theme ?? ""];
    if (next === null) {
      delete root.dataset.theme;
      localStorage.removeItem("quire-theme");
    } else {
      root.dataset.theme = next ?? "light";
      localStorage.setItem("quire-theme", root.dataset.theme);
    }
    label();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  label();
}
