// Before anything is drawn: the theme that was chosen here last.
try {
  const theme = localStorage.getItem("etude-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* Storage is off: the system's theme it is. */ }
