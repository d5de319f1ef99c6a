// One step's draft tree: what was guessed, which guesses were accepted, and what the target said.

import { add } from "./wire.js";

const visible = text => text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";

export function showTree(panel, number, step) {
  panel.replaceChildren();
  const { texts, parents, accepted, own } = step.tree;
  const drafted = texts.length - 1;
  const told = drafted ? `${drafted} guessed, ${accepted.length} accepted` : "nothing guessed";
  add(panel, "p", "", `Step ${number + 1}: ${told}`);
  const lists = [];
  const yes = new Set(accepted);
  texts.forEach((text, node) => {
    const parent = node ? lists[parents[node]] : add(panel, "div", "scroll");
    const list = parent.list || (parent.list = add(parent, "ul"));
    const item = add(list, "li");
    const kind = node === 0 ? "root" : yes.has(node) ? "accepted" : "rejected";
    add(item, "span", "node " + kind, visible(text)).title =
      { root: "known before", accepted: "guessed by the draft", rejected: "a guess that was wrong" }[kind];
    lists.push(item);
  });
  if (own === null) return;
  const end = lists[accepted.at(-1) ?? 0];
  const list = end.list || (end.list = document.createElement("ul"));
  end.append(list);
  const item = document.createElement("li");
  list.prepend(item); // what was said goes before the guesses that were not
  add(item, "span", "node own", visible(own)).title = "written by the target";
}
