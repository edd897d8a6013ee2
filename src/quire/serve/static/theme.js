// Apply the chosen theme before the page is drawn: "light", "dark", or none for that of the system.
"use strict";
const chosenTheme = localStorage.getItem("quire-theme");
if (chosenTheme) document.documentElement.dataset.theme = chosenTheme;
