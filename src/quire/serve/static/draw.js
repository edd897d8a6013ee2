// Helpers of both canvases: theme colours, pixel scaling, number formats.

export const REQUEST_COLOURS = 10;

// Resolve CSS colour variables to values that a canvas understands, in the current theme.
export function colours(names) {
  const probe = document.body.appendChild(document.createElement("span"));
  const found = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

export const requestColour = (slot) => `request-${slot % REQUEST_COLOURS}`;

// Return the cleared context of a canvas, in units of CSS pixels; null while it is not visible.
export function surface(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const count = (number) => number.toLocaleString("en");

export const duration = (seconds) => {
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min`;
};

// Return the smallest round number of one significant digit that is at least `value`, for the top of a scale.
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((digit) => digit * power).find((bound) => bound >= value * 0.999);
}
