// One answer on the page: its text, its numbers, its chart, and the draft tree of a chosen step.

import { Chart, speed } from "./chart.js";
import { showTree } from "./tree.js";
import { add } from "./wire.js";

export class Answer {
  constructor(parent, title) {
    this.box = add(parent, "section", "answer");
    add(this.box, "h2", "", title);
    this.text = add(this.box, "div", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", title + " answer; arrow keys go from step to step");
    this.numbers = add(this.box, "dl", "numbers");
    const canvas = add(this.box, "canvas");
    canvas.setAttribute("role", "img");
    canvas.hidden = true;
    this.caption = add(this.box, "p", "dim caption");
    this.caption.hidden = true;
    this.panel = add(this.box, "div", "tree dim", "Point at a step, or tap it, to see its draft tree.");
    this.panel.hidden = true;
    this.chart = new Chart(canvas, number => this.pick(number));
    this.steps = []; // { tokens, accepted, time, tree, element }
    this.picked = -1;
    this.content = "";
    this.usage = null;
    for (const kind of ["pointerover", "click"]) {
      this.text.addEventListener(kind, event => {
        const element = event.target.closest(".step");
        if (element) this.pick(Number(element.dataset.step));
      });
    }
    this.text.addEventListener("keydown", event => this.walk(event));
  }

  step({ speculation: { pieces, from_draft, trees } }) {
    const element = add(this.text, "span", "step");
    // Text that was held back comes without tokens of its own: it is the last step's.
    element.dataset.step = from_draft.length ? this.steps.length : this.steps.length - 1;
    for (const [text, drafted] of pieces) {
      this.content += text;
      add(element, drafted ? "mark" : "span", "", text);
    }
    if (!from_draft.length) return;
    const accepted = from_draft.filter(Boolean).length;
    const tree = trees.at(-1);
    this.steps.push({ tokens: from_draft.length, accepted, time: performance.now(), tree, element });
    if (!this.due) {
      this.due = true;
      requestAnimationFrame(() => { this.due = false; this.draw(); });
    }
  }

  walk(event) {
    const last = this.steps.length - 1;
    const to = { ArrowLeft: this.picked - 1, ArrowRight: this.picked + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.pick(Math.max(0, Math.min(last, to)));
  }

  pick(number) {
    const step = this.steps[number];
    if (!step || number === this.picked) return;
    this.steps[this.picked]?.element.classList.remove("picked");
    step.element.classList.add("picked");
    this.picked = number;
    this.panel.classList.remove("dim");
    showTree(this.panel, number, step);
    this.draw();
  }

  get tokens() { return this.steps.reduce((sum, step) => sum + step.tokens, 0); }

  get speed() { return speed(this.steps, this.steps.length - 1, 0); } // the first step is the prompt's

  draw() {
    const steps = this.steps.length;
    if (!steps) return;
    const accepted = this.steps.reduce((sum, step) => sum + step.accepted, 0);
    const rows = [
      ["tokens", this.tokens], ["τ", (this.tokens / steps).toFixed(2)],
      ["tokens/s", this.speed ? this.speed.toFixed(0) : "–"], ["accepted", accepted],
    ];
    if (this.usage) {
      const { accepted_prediction_tokens: yes, rejected_prediction_tokens: no } = this.usage.completion_tokens_details;
      rows[3] = ["accepted", yes + no ? `${yes} of ${yes + no} drafted` : "nothing drafted"];
      const { drafted_by_position: drafted, accepted_by_position: kept } = this.usage.speculation;
      if (drafted.length) rows.push(["by position", drafted.map((n, i) => Math.round(100 * kept[i] / n) + "%").join(" ")]);
    }
    this.numbers.replaceChildren();
    for (const [name, value] of rows) {
      const pair = add(this.numbers, "div");
      add(pair, "dt", "", name);
      add(pair, "dd", "", value);
    }
    const { canvas } = this.chart;
    canvas.setAttribute("aria-label", `Tokens of each of ${steps} steps, ${accepted} of them guessed by the draft.`);
    canvas.hidden = this.caption.hidden = this.panel.hidden = false;
    const { most, fastest } = this.chart.draw(this.steps, this.picked);
    this.caption.textContent = `Bars: tokens of each step, ${most} at most. Line: tokens/s` +
      (fastest ? `, ${fastest.toFixed(0)} at most.` : ".");
  }

  fail(message) { add(this.box, "p", "error", message).setAttribute("role", "alert"); }
}
