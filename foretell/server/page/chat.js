// The chat: settings, turns, and the race of plain against speculative decoding.

import { Answer } from "./answer.js";
import { $, add, call, events, failure } from "./wire.js";

const log = $("log");
const EXAMPLES = [
  "Explain in a few sentences why the sky is blue.",
  "Count from one to twenty, then count backwards.",
  "Write a short letter that thanks a neighbour.",
];
let messages = [];
let stop = null; // ends the answer in progress

async function ask(answer, enabled, signal) {
  const body = {
    messages, stream: true, stream_options: { include_usage: true },
    temperature: Number($("temperature").value), max_tokens: Number($("tokens").value),
    seed: Number($("seed").value), speculation: { enabled, trace: true },
  };
  try {
    const got = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    if (!got.ok) return answer.fail(await failure(got));
    for await (const event of events(got)) {
      if (event.error) return answer.fail(event.error.message);
      if (event.usage) answer.usage = event.usage;
      const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      for (const choice of event.choices) if (choice.speculation) answer.step(choice);
      if (near) log.scrollTop = log.scrollHeight;
    }
    answer.draw();
    return true;
  } catch (error) {
    answer.fail(error.name === "AbortError" ? "stopped" : "the server cannot be reached: " + error.message);
  }
}

function welcome() {
  const box = add(log, "div", "hello");
  add(box, "p", "dim", "Tokens come as the model says them, coloured by who supplied them. Try one of these, or ask something of your own.");
  for (const text of EXAMPLES) {
    add(box, "button", "", text).addEventListener("click", () => { $("prompt").value = text; send(); });
  }
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || stop) return;
  $("prompt").value = "";
  log.querySelector(".hello")?.remove();
  messages.push({ role: "user", content: text });
  const turn = add(log, "div", "turn");
  add(turn, "p", "asked", text);
  const row = add(turn, "div", "answers");
  log.scrollTop = log.scrollHeight;
  stop = new AbortController();
  $("send").textContent = "Stop";
  let kept = null;
  if ($("race").checked) { // one after the other: side by side they would share each step
    const plain = new Answer(row, "plain");
    const quick = new Answer(row, "speculative");
    if (await ask(plain, false, stop.signal) && await ask(quick, true, stop.signal)) {
      const same = plain.content === quick.content;
      const ratio = plain.speed && quick.speed ? (quick.speed / plain.speed).toFixed(2) + "x the speed, " : "";
      add(turn, "p", "verdict", ratio + (same ? "the same text" : "NOT the same text"));
      kept = quick;
    }
  } else {
    const on = $("speculate").checked;
    const answer = new Answer(row, on ? "speculative" : "plain");
    await ask(answer, on, stop.signal);
    kept = answer;
  }
  if (kept && kept.content) messages.push({ role: "assistant", content: kept.content });
  else messages.pop();
  stop = null;
  $("send").textContent = "Send";
  log.scrollTop = log.scrollHeight;
  if (matchMedia("(pointer: fine)").matches) $("prompt").focus(); // on a phone it opens the keyboard
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (stop) stop.abort(); else send();
});
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && stop) stop.abort(); });
$("clear").addEventListener("click", () => { if (!stop) { messages = []; log.replaceChildren(); welcome(); $("prompt").focus(); } });

async function hello() {
  try {
    const answer = await call("/v1/models");
    if (!answer.ok) { $("model").textContent = await failure(answer); return; }
    const model = (await answer.json()).data[0];
    const how = model.speculation ? `${model.speculation.method}, k = ${model.speculation.k}` : "no speculation";
    $("model").textContent = `${model.id} · ${how}`;
  } catch { $("model").textContent = "the server cannot be reached"; }
}
$("key").addEventListener("change", hello);
welcome();
hello();
