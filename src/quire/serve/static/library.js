// The list of conversations: open, rename, delete, export, import.

import { button, make } from "./dom.js";
import { openStore } from "./store.js";
import { download, exported, readFile } from "./transfer.js";

const TITLE_LETTERS = 60;
const $ = (id) => document.getElementById(id);

export const newConversation = () => ({ id: randomName(), title: "", system: "", updated: Date.now(), messages: [] });

// Return 32 random hexadecimal digits. (crypto.randomUUID is missing on pages loaded over plain HTTP.)
const randomName = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const text = conversation.messages[0]?.content.replace(/\s+/g, " ").trim() ?? "";
  if (!text) return "New conversation";
  return text.length > TITLE_LETTERS ? `${text.slice(0, TITLE_LETTERS).trim()} …` : text;
}

// `open` is called with the conversation that the user chooses, or with null if the open one was deleted.
export class Library {
  constructor(open) {
    Object.assign(this, { open, conversations: [], current: null, deleted: null });
    this.ready = this.load();
    $("export").addEventListener("click", () => this.export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import($("import-file")));
    $("undo").addEventListener("click", () => this.undo());
    if (matchMedia("(max-width: 75rem)").matches) $("library").open = false;
  }

  async load() {
    this.store = await openStore();
    try {
      this.conversations = await this.store.all();
    } catch (problem) {
      this.say(`The stored conversations cannot be read: ${problem.message}`);
    }
    if (!this.store.lasting) this.say("This browser window keeps conversations only until the page is closed.");
    this.draw();
  }

  async add(conversation) {
    await this.ready;
    if (!this.conversations.includes(conversation)) this.conversations.push(conversation);
    await this.save(conversation);
  }

  // Keep the new state of a conversation, unless it was deleted.
  async save(conversation) {
    if (!this.conversations.includes(conversation)) return;
    conversation.updated = Date.now();
    await this.keep(conversation);
  }

  async keep(conversation) {
    try {
      await this.store.put(conversation);
    } catch (problem) {
      this.say(`The conversation cannot be kept: ${problem.message}`);
    }
    this.draw();
  }

  select(conversation) {
    this.current = conversation;
    this.draw();
  }

  async delete(conversation) {
    this.conversations = this.conversations.filter((other) => other !== conversation);
    await this.store.delete(conversation.id);
    this.deleted = conversation;
    this.say(`Deleted “${titleOf(conversation)}”.`);
    $("undo").hidden = false;
    this.draw();
    $("undo").focus();
    if (conversation === this.current) this.open(null);
  }

  async undo() {
    $("undo").hidden = true;
    this.say("");
    this.conversations.push(this.deleted);
    await this.keep(this.deleted);
  }

  export() {
    const day = new Date().toISOString().slice(0, 10);
    download(`quire-conversations-${day}.json`, exported(this.conversations));
  }

  async import(input) {
    const [file] = input.files;
    input.value = ""; // the same file can be chosen again
    try {
      const found = await readFile(file);
      for (const conversation of found) {
        if (this.conversations.some(({ id }) => id === conversation.id)) conversation.id = randomName();
        this.conversations.push(conversation);
        await this.keep(conversation);
      }
      this.say(`Imported ${found.length} conversation${found.length === 1 ? "" : "s"}.`);
    } catch (problem) {
      this.say(problem.message);
    }
  }

  say(text) {
    $("undo").hidden = true;
    $("library-state").textContent = text;
  }

  draw() {
    this.conversations.sort((a, b) => b.updated - a.updated);
    $("conversations").replaceChildren(...this.conversations.map((conversation) => this.row(conversation)));
    $("export").disabled = this.conversations.length === 0;
    $("title").textContent = titleOf(this.current ?? newConversation());
  }

  row(conversation) {
    const title = titleOf(conversation);
    const choose = button("open", title, () => this.open(conversation));
    choose.title = `${title}\n${new Date(conversation.updated).toLocaleString()}`;
    if (conversation === this.current) choose.setAttribute("aria-current", "true");
    const row = make("li", "", choose);
    row.append(button("symbol", "✎", () => this.rename(row, conversation), `Rename “${title}”`));
    row.append(button("symbol", "✕", () => this.delete(conversation), `Delete “${title}”`));
    return row;
  }

  rename(row, conversation) {
    const field = make("input");
    field.value = titleOf(conversation);
    field.maxLength = 200;
    field.setAttribute("aria-label", "Title of the conversation");
    let done = false;
    const finish = async (keep) => {
      if (done) return;
      done = true;
      if (keep) conversation.title = field.value.trim();
      await this.keep(conversation);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") finish(event.key === "Enter");
    });
    field.addEventListener("blur", () => finish(true));
    row.replaceChildren(field);
    field.select();
  }
}
