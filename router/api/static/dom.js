// Elements, and changing only what changed. Text goes in as text: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties (`class`, `on…`, attributes) and children (elements or text). */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else attr(node, name, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Set, change or (null, undefined, false) take away an attribute. */
export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
  return node;
}

/** The text of a node; touched only when it differs. */
export function put(node, text) {
  const told = text === null || text === undefined ? "" : String(text);
  if (node.told !== told) {
    node.told = told;
    node.textContent = told;
  }
  return node;
}

export function show(node, shown) {
  if (node.hidden === Boolean(shown)) node.hidden = !shown;
  return node;
}

/** A list whose items keep their elements. `make(key)` gives an object with `root` and `update(item)`. */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.views = new Map();
  }

  render(entries) {
    const wanted = new Set(entries.map(([key]) => key));
    for (const [key, view] of this.views) {
      if (!wanted.has(key)) {
        view.root.remove();
        this.views.delete(key);
      }
    }
    let at = this.parent.firstChild;
    for (const [key, item] of entries) {
      let view = this.views.get(key);
      if (!view) {
        view = this.make(key);
        this.views.set(key, view);
      }
      view.update(item);
      if (view.root === at) at = at.nextSibling;
      else this.parent.insertBefore(view.root, at);
    }
  }
}

/** Shows a part of a long list, and buttons for the rest: what is on the page stays small whatever there is. */
export class Pager {
  constructor(parent, size, word, make, tag = "div") {
    this.size = size;
    this.word = word;
    this.page = 0;
    this.list = el(tag, { class: "list" });
    this.keyed = new Keyed(this.list, make);
    this.text = el("span", {});
    this.back = el("button", { type: "button", onclick: () => this.turn(-1) }, "Back");
    this.on = el("button", { type: "button", onclick: () => this.turn(1) }, "More");
    this.nav = el("nav", { class: "pager", "aria-label": `Pages of ${word}` }, this.back, this.text, this.on);
    parent.append(this.list, this.nav);
    this.entries = [];
  }

  turn(by) {
    this.page += by;
    this.render(this.entries);
  }

  render(entries) {
    this.entries = entries;
    const pages = Math.max(1, Math.ceil(entries.length / this.size));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    const start = this.page * this.size;
    this.keyed.render(entries.slice(start, start + this.size));
    show(this.nav, pages > 1);
    attr(this.back, "disabled", this.page === 0);
    attr(this.on, "disabled", this.page === pages - 1);
    put(this.text, `${start + 1} to ${Math.min(entries.length, start + this.size)} of ${entries.length} ${this.word}`);
  }
}

/** A small line of `[x, y]` points, `floor` at its foot; `label` says in words what it shows. */
export class Spark {
  constructor(width = 120, height = 24) {
    this.size = [width, height];
    this.path = document.createElementNS(SVG, "path");
    this.root = document.createElementNS(SVG, "svg");
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.setAttribute("class", "spark");
    this.root.setAttribute("role", "img");
    this.root.append(this.path);
  }

  update(points, label, floor = 0) {
    const [width, height] = this.size;
    const known = points.filter(([, y]) => y !== null);
    const [xs, ys] = [known.map(([x]) => x), known.map(([, y]) => y)];
    const [left, right, top] = [Math.min(...xs), Math.max(...xs), Math.max(...ys, floor + 1e-9)];
    const spots = known.map(([x, y], index) => {
      const across = right > left ? ((x - left) / (right - left)) * (width - 4) + 2 : width / 2;
      return `${index ? "L" : "M"}${across.toFixed(1)} ${(height - 2 - ((y - floor) / (top - floor)) * (height - 4)).toFixed(1)}`;
    });
    attr(this.path, "d", spots.length === 1 ? `${spots[0]}h1` : spots.join(""));
    attr(this.root, "aria-label", label);
  }
}
