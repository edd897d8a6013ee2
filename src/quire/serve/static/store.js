// Conversations in the browser's database (IndexedDB). They never leave the browser, except in the user's requests.

const [DATABASE, TABLE] = ["quire", "conversations"];

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

class DatabaseStore {
  constructor(database) {
    this.database = database;
    this.lasting = true;
  }

  table(mode) {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }

  all() {
    return settled(this.table("readonly").getAll());
  }

  put(conversation) {
    return settled(this.table("readwrite").put(conversation));
  }

  delete(id) {
    return settled(this.table("readwrite").delete(id));
  }
}

// Conversations of this page only, for browsers that allow no database, such as in some private windows.
class MemoryStore {
  constructor() {
    this.kept = new Map();
    this.lasting = false;
  }

  async all() {
    return [...this.kept.values()];
  }

  async put(conversation) {
    this.kept.set(conversation.id, structuredClone(conversation));
  }

  async delete(id) {
    this.kept.delete(id);
  }
}

export async function openStore() {
  try {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    return new DatabaseStore(await settled(request));
  } catch {
    return new MemoryStore();
  }
}
