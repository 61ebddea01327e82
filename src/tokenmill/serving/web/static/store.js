// Conversations, kept in this browser (IndexedDB). Where it refuses, they last as long as the page.

const NAME = "tokenmill";
const TABLE = "conversations";
const memory = new Map();
let opened;

function open() {
  opened ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opened;
}

async function run(mode, act) {
  const database = await open();
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(TABLE, mode);
    const request = act(transaction.objectStore(TABLE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export async function allConversations() {
  const found = (await run("readonly", (table) => table.getAll())) ?? [...memory.values()];
  return found.sort((one, other) => other.updated - one.updated);
}

export async function keep(conversation) {
  memory.set(conversation.id, conversation);
  await run("readwrite", (table) => table.put(conversation));
}

export async function forget(id) {
  memory.delete(id);
  await run("readwrite", (table) => table.delete(id));
}
