// Markdown to elements, for the answers of models: the parts of CommonMark and of GitHub's tables that models write.
//
// Safe by construction: all text goes into text nodes, HTML stays text, links open only web and mail addresses, and
// images become links. Every pass is linear in the length of the text, so no answer can stall the page.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";

const MAX_DEPTH = 12; // of nested lists and quotes; deeper ones are shown as text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const LINK_TARGET = /\]\( *<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500})?)>?(?: +"[^"\n]{0,300}")? *\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"'`*]{1,2000}/y;
const BREAK = /<br ?\/?>/iy;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

// A view of Markdown text that grows: `show` redraws only the blocks that changed.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.blocks = []; // { source, element } of the blocks shown
  }

  show(text) {
    const blocks = split(text.split("\n"), 0);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.blocks[same]?.source) same++;
    for (const { element } of this.blocks.splice(same)) element.remove();
    for (const { source, build } of blocks.slice(same)) {
      const element = build();
      this.root.append(element);
      this.blocks.push({ source, element });
    }
  }
}

// Return the blocks of `lines` as { source, build, text }: `build` returns an element, paragraphs have their `text`.
function split(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const { end, build, text } = block(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), build, text });
    at = end;
  }
  return blocks;
}

// Return the block that begins at line `at`. `end` is the line after it.
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { end: at + 1, build: () => asHeading(heading) };
  if (isRule(line)) return { end: at + 1, build: () => make("hr") };
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end++;
  const text = lines.slice(at, end).join("\n").trim();
  return { end, text, build: () => make("p", "", ...inline(text)) };
}

// Return whether line `at` begins a block that ends a paragraph.
const begins = (lines, at) =>
  [FENCE, HEADING, QUOTE, ITEM].some((form) => form.test(lines[at])) || isRule(lines[at]) || isTable(lines, at);

function isRule(line) {
  const marks = line.replace(/\s/g, "");
  return marks.length > 2 && "*-_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function code(lines, at, [, mark, language]) {
  let end = at + 1;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
  };
  while (end < lines.length && !closes(lines[end])) end++;
  const text = lines.slice(at + 1, end).join("\n");
  return { end: Math.min(end + 1, lines.length), build: () => codeBlock(text, language) };
}

// Return code with its language and a button that copies it.
export function codeBlock(text, language = "") {
  const pre = make("pre", "", make("code", "", text));
  reachable(pre, language ? `Code in ${language}` : "Code");
  const copy = copyButton(() => text);
  return make("div", "code", make("div", "code-bar", make("span", "", language || "code"), copy), pre);
}

// Let the keyboard reach an element that may scroll.
function reachable(element, name) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
}

function asHeading([, marks, text]) {
  const level = Math.min(6, marks.length + 3); // a message's own heading is h3
  return make(`h${level}`, "", ...inline(text.trim().replace(/\s#+$/, "")));
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, build: () => make("blockquote", "", ...split(inner, depth + 1).map(({ build }) => build())) };
}

function list(lines, at, depth) {
  const [, margin, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let [end, loose, blank] = [at, false, false];
  let inside = 0; // indentation of the content of the current item
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      blank = true;
      items.at(-1)?.push("");
      continue;
    }
    const indent = line.length - line.trimStart().length;
    const item = ITEM.exec(line);
    if (item && (!items.length || indent - margin.length < 2) && indent >= margin.length && !isRule(line)) {
      if (/\d/.test(item[2]) !== ordered) break;
      loose ||= blank && items.length > 0;
      inside = indent + item[2].length + Math.min(item[3].length || 1, 4);
      items.push([line.slice(item[0].length)]);
    } else if (indent >= inside || (indent > margin.length && indent >= 2)) {
      loose ||= blank && !item;
      items.at(-1).push(line.slice(Math.min(indent, inside)));
    } else if (!blank && !begins(lines, end)) {
      items.at(-1).push(line.trimStart()); // the paragraph continues
    } else {
      break;
    }
    blank = false;
  }
  return { end, build: () => asList(items, ordered ? Number.parseInt(mark, 10) : null, loose, depth) };
}

function asList(items, start, loose, depth) {
  const element = make(start === null ? "ul" : "ol");
  if (start !== null && start !== 1) element.start = start;
  for (const lines of items) {
    const item = element.appendChild(make("li"));
    for (const { text, build } of split(lines, depth + 1)) {
      if (text !== undefined && !loose) item.append(...inline(text));
      else item.append(build());
    }
  }
  return element;
}

const cells = (line) =>
  line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.every((cell) => /^:?-+:?$/.test(cell)) && rule.length === cells(lines[at]).length;
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
  const sides = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "centre" : "right") : ""));
  const row = (line, tag) =>
    make("tr", "", ...sides.map((side, index) => make(tag, side, ...inline(cells(line)[index] ?? ""))));
  const build = () => {
    const body = make("tbody", "", ...lines.slice(at + 2, end).map((line) => row(line, "td")));
    const box = make("div", "table", make("table", "", make("thead", "", row(lines[at], "th")), body));
    reachable(box, "Table");
    return box;
  };
  return { end, build };
}

// Return the nodes of text with emphasis, code, links and line breaks.
export function inline(text) {
  const parts = []; // strings and elements
  const open = []; // { mark, at }: the opening marks that have no closing one yet, and their place in `parts`
  const backticks = backtickRuns(text);
  let at = 0;
  const put = (part) => {
    const joins = typeof part === "string" && typeof parts.at(-1) === "string" && open.at(-1)?.at !== parts.length - 1;
    if (joins) parts.push(parts.pop() + part);
    else parts.push(part);
  };

  const close = (mark, wrap) => {
    const index = open.findLastIndex((entry) => entry.mark === mark);
    const element = wrap(parts.splice(open[index].at).slice(1));
    open.length = index;
    put(element);
  };
  const isOpen = (mark) => open.some((entry) => entry.mark === mark);
  const begin = (mark, shown = mark) => {
    open.push({ mark, at: parts.length });
    parts.push(shown);
  };

  while (at < text.length) {
    const letter = text[at];
    if (letter === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      put(text[at + 1]);
      at += 2;
    } else if (letter === "`") {
      const length = run(text, at);
      const end = backticks(length, at);
      put(end < 0 ? "`".repeat(length) : make("code", "", text.slice(at + length, end).replace(/^ (.+) $/s, "$1")));
      at = end < 0 ? at + length : end + length;
    } else if (letter === "*" || letter === "_" || letter === "~") {
      const length = run(text, at);
      emphasis(text, at, length, { isOpen, begin, close, put, last: () => open.at(-1)?.mark });
      at += length;
    } else if (!isOpen("[") && (letter === "[" || (letter === "!" && text[at + 1] === "["))) {
      begin("[", letter === "!" ? "![" : "["); // an image is shown as a link to it
      at += letter === "!" ? 2 : 1;
    } else if (letter === "]" && isOpen("[")) {
      const target = match(LINK_TARGET, text, at);
      if (target && isSafe(target[1])) close("[", (inner) => link(target[1], inner.length ? inner : [target[1]]));
      else {
        const index = open.findLastIndex((entry) => entry.mark === "[");
        open.splice(index, 1); // a bracket, not a link
        put(target ? target[0] : "]");
      }
      at += target ? target[0].length : 1;
    } else if (letter === "h" && !WORD.test(text[at - 1] ?? "") && !isOpen("[") && match(BARE_LINK, text, at)) {
      const address = match(BARE_LINK, text, at)[0].replace(/[.,;:!?)\]}]{1,9}$/, "");
      put(link(address, [address]));
      at += address.length;
    } else if (letter === "<" && match(BREAK, text, at)) {
      put(make("br"));
      at += match(BREAK, text, at)[0].length;
    } else {
      let end = at + 1;
      while (end < text.length && !"\\`*_~[]h<!".includes(text[end])) end++;
      put(text.slice(at, end));
      at = end;
    }
  }
  return parts;
}

const WRAPS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

// Open and close emphasis at a run of one letter. Each mark is open at most once, which bounds the nesting.
function emphasis(text, at, length, { isOpen, begin, close, put, last }) {
  const letter = text[at];
  const [before, after] = [text[at - 1] ?? " ", text[at + length] ?? " "];
  const word = letter === "_" && WORD.test(before) && WORD.test(after);
  const closes = /\S/.test(before) && !word;
  const opens = /\S/.test(after) && !word;
  let left = length;
  const finish = (mark) => {
    close(mark, (inner) => make(WRAPS[mark], "", ...inner));
    left -= mark.length;
  };
  const start = (mark) => {
    begin(mark);
    left -= mark.length;
  };
  const [one, two] = [letter, letter + letter];
  while (left > 0) {
    const single = WRAPS[one] && isOpen(one);
    if (closes && length === 2 && left === 2 && isOpen(two)) finish(two);
    else if (closes && single && (last() === one || left === 1)) finish(one);
    else if (closes && left > 1 && isOpen(two)) finish(two);
    else if (closes && single) finish(one);
    else if (opens && left > 1 && !isOpen(two)) start(two);
    else if (opens && WRAPS[one] && !isOpen(one)) start(one);
    else {
      put(letter.repeat(left));
      left = 0;
    }
  }
}

function run(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

// Return a function that finds the next run of `length` backticks after `at`. Places must be asked for in rising order.
function backtickRuns(text) {
  const places = new Map();
  for (const found of text.matchAll(/`+/g)) {
    if (!places.has(found[0].length)) places.set(found[0].length, { starts: [], next: 0 });
    places.get(found[0].length).starts.push(found.index);
  }
  return (length, at) => {
    const known = places.get(length);
    while (known && known.starts[known.next] <= at) known.next++;
    return known?.starts[known.next] ?? -1;
  };
}

function match(form, text, at) {
  form.lastIndex = at;
  return form.exec(text);
}

const isSafe = (address) => /^(https?:\/\/|mailto:)/i.test(address);

function link(address, inner) {
  const element = make("a", "", ...inner);
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  return element;
}
