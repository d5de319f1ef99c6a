// How the page talks to the server.

export const $ = id => document.getElementById(id);

export function add(parent, tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

export function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = "Bearer " + $("key").value;
  return fetch(path, { headers, ...options });
}

export async function failure(answer) {
  if (answer.status === 401) return "this server asks for its key: type it below";
  try { return (await answer.json()).error.message; } catch { return "HTTP " + answer.status; }
}

export async function* events(answer) { // server-sent events, as objects
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
