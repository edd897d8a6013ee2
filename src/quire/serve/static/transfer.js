// Export and import of conversations as a JSON file.

const FORMAT = "quire-conversations";
const MAX_BYTES = 64 * 1024 * 1024;
const TEXTS = ["thought", "kind", "reason"];

// Return the text of a file with `conversations`. Texts and log-probabilities are exported, measurements are not.
export function exported(conversations) {
  conversations = conversations.map((conversation) => checked(conversation, conversation.title));
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

// Offer `text` as a download.
export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Return the conversations in a file, or throw an Error that says what is wrong with it.
export async function readFile(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} must have at most 64 MiB, got ${Math.ceil(file.size / 2 ** 20)}.`);
  return imported(await file.text(), file.name);
}

export function imported(text, name = "the file") {
  let data;
  try {
    data = JSON.parse(text);
  } catch (problem) {
    throw new Error(`${name} is not JSON: ${problem.message}`);
  }
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) {
    throw new Error(`${name} is not an export of this page: "format" must be "${FORMAT}" and "version" 1.`);
  }
  return data.conversations.map((conversation, index) => checked(conversation, `conversation ${index + 1} in ${name}`));
}

// Return a copy of a conversation with the known fields only.
function checked(conversation, where) {
  const wrong = (what) => new Error(`${where}: ${what}.`);
  if (!conversation || typeof conversation !== "object") throw wrong("must be an object");
  const { id, title, system = "", updated, messages } = conversation;
  if (typeof id !== "string" || !id) throw wrong('"id" must be a text');
  if (typeof title !== "string") throw wrong('"title" must be a text');
  if (typeof system !== "string") throw wrong('"system" must be a text');
  if (!Number.isFinite(updated)) throw wrong('"updated" must be a number');
  if (!Array.isArray(messages)) throw wrong('"messages" must be a list');
  return { id, title, system, updated, messages: messages.map((message, index) => checkedMessage(message, (what) => wrong(`message ${index + 1}: ${what}`))) };
}

function checkedMessage(message, wrong) {
  if (!message || !["user", "assistant"].includes(message.role)) throw wrong('"role" must be "user" or "assistant"');
  if (typeof message.content !== "string") throw wrong('"content" must be a text');
  const copy = { role: message.role, content: message.content, plain: message.plain === true };
  for (const name of TEXTS) if (typeof message[name] === "string") copy[name] = message[name];
  if (Array.isArray(message.logprobs)) copy.logprobs = message.logprobs.filter(isToken);
  return copy;
}

const isToken = (entry) =>
  typeof entry?.token === "string" && Number.isFinite(entry.logprob) && Array.isArray(entry.top) &&
  entry.top.every((pair) => Array.isArray(pair) && typeof pair[0] === "string" && Number.isFinite(pair[1]));
