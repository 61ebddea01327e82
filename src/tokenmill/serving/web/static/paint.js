// Canvases: sharp on every screen, with the colours of the page.

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

// The colour that a variable of the style sheet has now, as a canvas takes it.
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function colours(...names) {
  return Object.fromEntries(names.map((name) => [name, colour(name)]));
}

// A context that draws in CSS pixels, and the size of its canvas in them.
export function begin(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width };
}
