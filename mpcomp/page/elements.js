"use strict";
// Parts of which all pages draw themselves: elements, axes, tooltips, and numbers in words.
const page = (() => {
  // Told apart by all eyes.
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];

  const at = (id) => document.getElementById(id);
  function put(parent, tag, props = {}, ...children) {
    const element = document.createElement(tag);
    Object.assign(element, props);
    element.append(...children);
    parent?.append(element);
    return element;
  }
  // The namespace as the parser knows it.
  const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
  function draw(parent, tag, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    parent?.append(element);
    return element;
  }
  const clear = (element) => element.replaceChildren();
  // A method's name, which may break after its parts.
  function named(parent, text, className = "name") {
    const name = put(parent, "span", { className });
    for (const part of text.replace(/\+|\/ |:(?=[a-z]+=)/g, "$&\n").split("\n")) name.append(part, put(null, "wbr"));
    return name;
  }

  // Calls when the width of an element has changed, and not when what was drawn made it higher.
  function onWidth(element, call) {
    let width = 0;
    new ResizeObserver(() => {
      if (element.clientWidth !== width) {
        width = element.clientWidth;
        requestAnimationFrame(call);
      }
    }).observe(element);
  }

  function tooltipOf(picture) {
    const box = put(picture, "div", { className: "tooltip", hidden: true });
    return {
      hide: () => { box.hidden = true; },
      show(event, lines) {
        box.replaceChildren(...lines);
        box.hidden = false;
        const frame = picture.getBoundingClientRect();
        const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
        // On the side where there is room, and never under the finger.
        const left = x + 16 + box.offsetWidth <= frame.width ? x + 16 : x - 16 - box.offsetWidth;
        box.style.left = `${Math.max(0, Math.min(left, frame.width - box.offsetWidth))}px`;
        box.style.top = `${Math.max(0, y - box.offsetHeight - 12)}px`;
      },
    };
  }

  function secondsText(seconds) {
    return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1e3 * seconds).toFixed(1)} ms`;
  }
  // Round numbers for an axis, about as many as wanted.
  function ticksOf(low, high, wanted) {
    const rough = (high - low) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++)
      found.push({ at: k * step, text: (k * step).toFixed(digits) });
    return found;
  }
  return { COLOURS, at, put, draw, clear, named, onWidth, tooltipOf, secondsText, ticksOf };
})();
