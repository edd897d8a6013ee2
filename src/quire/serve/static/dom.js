// Build elements. Text always becomes text nodes, so nothing that a model or a server writes is parsed as HTML.

// Return a new element. `children` are elements or strings; empty strings and null are left out.
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Return a button that calls `act`. `name` replaces the visible text for screen readers, where that is a symbol.
export function button(className, text, act, name) {
  const element = make("button", className, text);
  element.type = "button";
  if (name) {
    element.setAttribute("aria-label", name);
    element.title = name;
  }
  element.addEventListener("click", act);
  return element;
}
