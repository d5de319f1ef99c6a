// A live chart: a bar for each step, the target's own token below and accepted drafts above it,
// and a line of tokens/s.

const WINDOW = 12; // steps that the line averages over

export class Chart {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.first = 0; // of the steps shown
    this.bar = 1; // width in CSS pixels
    canvas.addEventListener("pointermove", event => onPick(this.at(event)));
    canvas.addEventListener("pointerdown", event => onPick(this.at(event)));
  }

  at(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.first + Math.floor(x / this.bar);
  }

  draw(steps, picked) {
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue(name);
    const scale = devicePixelRatio || 1;
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const paint = this.canvas.getContext("2d");
    paint.scale(scale, scale);
    this.first = Math.max(0, steps.length - Math.floor(width / 4));
    const shown = steps.slice(this.first);
    this.bar = Math.min(10, width / Math.max(shown.length, 1));
    const most = Math.max(4, ...shown.map(step => step.tokens));
    shown.forEach((step, i) => {
      const own = (step.tokens - step.accepted) / most * height;
      const drafts = step.accepted / most * height;
      if (this.first + i === picked) {
        paint.fillStyle = colour("--line");
        paint.fillRect(i * this.bar, 0, this.bar, height);
      }
      paint.fillStyle = colour("--own");
      paint.fillRect(i * this.bar, height - own, this.bar - 1, own);
      paint.fillStyle = colour("--draft");
      paint.fillRect(i * this.bar, height - own - drafts, this.bar - 1, drafts);
    });
    const speeds = shown.map((_, i) => speed(steps, this.first + i));
    const fastest = Math.max(1, ...speeds) * 1.1;
    paint.strokeStyle = colour("--accent");
    paint.lineWidth = 1.5;
    paint.beginPath();
    speeds.forEach((value, i) => {
      if (value) paint.lineTo((i + .5) * this.bar, height - value / fastest * height);
    });
    paint.stroke();
    return { most: Math.max(...shown.map(step => step.tokens)), fastest: Math.max(...speeds) };
  }
}

export function speed(steps, last, from = Math.max(0, last - WINDOW)) { // tokens/s up to a step
  if (last <= from) return 0;
  const tokens = steps.slice(from + 1, last + 1).reduce((sum, step) => sum + step.tokens, 0);
  const seconds = (steps[last].time - steps[from].time) / 1000;
  return seconds ? tokens / seconds : 0;
}
