// A document that is just enough for the page of a plan to draw itself into, without a browser:
//
//     node page_document.js PAGE < COMMANDS
//
// runs the page's scripts, then the commands, and prints as JSON what those `tell`.
"use strict";
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, classes: new Set() });
    Object.assign(this, { hidden: false, clientWidth: 600, offsetWidth: 100, offsetHeight: 50 });
    this.classList = { add: (name) => this.classes.add(name), toggle: () => {} };
    this.own = {};
  }
  get style() { return this.own; }
  set style(text) { this.own = { cssText: text }; }
  get textContent() {
    return this.children.map((child) => (child instanceof Element ? child.textContent : child)).join("");
  }
  set textContent(text) { this.children = [String(text)]; }
  append(...children) {
    for (const child of children) {
      if (child instanceof Element) child.parentNode = this;
      this.children.push(child);
    }
  }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(kind, call) { (this.listeners[kind] ??= []).push(call); }
  getBoundingClientRect() { return { left: 0, top: 0, width: 600, height: 300 }; }
  // For commands.
  fire(kind, event = {}) { for (const call of this.listeners[kind] ?? []) call(event); }
  all(tag) {
    const inside = this.children.filter((child) => child instanceof Element);
    return [...inside.filter((child) => child.tag === tag), ...inside.flatMap((child) => child.all(tag))];
  }
}

const page = fs.readFileSync(process.argv[2], "utf8");
const scripts = [...page.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
const elements = new Map();
for (const [, id] of page.matchAll(/\sid="([^"]+)"/g)) elements.set(id, new Element("div"));
const told = [];
const context = vm.createContext({
  document: {
    getElementById: (id) => elements.get(id),
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
  },
  DOMParser: class {
    parseFromString() { return { querySelector: () => ({ namespaceURI: "svg" }) }; }
  },
  ResizeObserver: class {
    constructor(call) { this.call = call; }
    observe() { this.call(); }
  },
  requestAnimationFrame: (call) => call(),
  tell: (value) => told.push(value),
});
for (const [, attributes, text] of scripts)
  if (attributes.includes("json")) elements.get("plan").textContent = text;
  else vm.runInContext(text, context);
vm.runInContext(fs.readFileSync(0, "utf8"), context);
console.log(JSON.stringify(told));
