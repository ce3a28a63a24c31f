// The live state of the mesh: everything at first, then what changes, once a second; begun again when it breaks.

const RETRY_MS = 1000;
const SILENT_MS = 5000;

export const key = {
  get: () => sessionStorage.getItem("penstock-key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("penstock-key", value) : sessionStorage.removeItem("penstock-key")),
  headers: () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
};

/** Asks the frontend; throws an Error with its message where it refuses. */
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...key.headers(), ...options.headers } });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `HTTP ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not ours: a proxy's page, say */ }
  return Object.assign(new Error(message), { status: response.status });
}

/** The data of each event of a stream. */
export async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line) yield line.slice(6);
    }
  }
}

/** Takes in an update; returns the state as it is then: {body, instances (objects), series (objects), viewer}. */
export function take(state, update) {
  const rows = update.is_whole ? new Map() : state.rows;
  const columns = update.is_whole ? update.columns : state.columns;
  const pointColumns = update.is_whole ? update.point_columns : state.pointColumns;
  for (const name of update.gone) rows.delete(name);
  for (const row of update.instances) rows.set(row[0], named(columns, row));
  const points = update.series.map((point) => named(pointColumns, point));
  const series = update.is_whole ? points : [...state.series, ...points].slice(-300);
  const instances = [...rows.values()].sort((a, b) => (a.instance_id < b.instance_id ? -1 : 1));
  return { number: update.number, body: update.body, viewer: update.viewer, rows, columns, pointColumns, series, instances };
}

/** A row of the wire as an object. */
export function named(columns, row) {
  const object = {}; // a plain loop: it is done for a thousand rows of each update
  for (let index = 0; index < columns.length; index++) object[columns[index]] = row[index];
  return object;
}

/** Calls `onState` with each state and `onStatus` with how the connection is: {text, isLive, needsKey}. */
export class Feed {
  constructor(onState, onStatus) {
    this.onState = onState;
    this.onStatus = onStatus;
    this.state = null;
    this.heardMs = performance.now();
    setInterval(() => this.#watch(), 1000);
  }

  /** Begin, or begin again with another key. */
  restart() {
    this.controller?.abort();
    this.controller = new AbortController();
    this.#run(this.controller.signal);
  }

  async #run(signal) {
    while (!signal.aborted) {
      try {
        const response = await ask("console/events", { signal });
        for await (const data of events(response)) {
          if (signal.aborted) return;
          this.heardMs = performance.now();
          this.state = take(this.state, JSON.parse(data));
          this.onStatus({ text: "live", isLive: true });
          this.onState(this.state);
        }
        this.onStatus({ text: "the frontend has ended the connection; trying again" });
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) {
          this.onStatus({ text: error.message, needsKey: true });
          return;
        }
        this.onStatus({ text: `no connection: ${error.message}` });
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #watch() {
    const silentMs = performance.now() - this.heardMs;
    if (this.state && silentMs > SILENT_MS) {
      this.onStatus({ text: `no news for ${Math.round(silentMs / 1000)} s: what is shown is old` });
    }
  }
}
