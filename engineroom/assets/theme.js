"use strict";
// Before anything is drawn: the theme that was chosen here before. Without a choice the system's holds.
try {
  const theme = localStorage.getItem("lanekeeper-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the system's theme holds */ }
