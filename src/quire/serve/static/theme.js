// The theme that was chosen, before anything is drawn: "light", "dark", or nothing for the system's.
"use strict";
const chosenTheme = localStorage.getItem("quire-theme");
if (chosenTheme) document.documentElement.dataset.theme = chosenTheme;
