// What the server says. Every address is relative and named like a file, so exported files answer as well.

const TOKEN = "corral-token";
const kept = new Map(); // answers that never change: of steps and trajectories
const KEPT = 200;

export class TokenNeeded extends Error {}

export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** Takes the token out of the address (`#token=...`), where it would stay in the history. */
export function takeTokenFromAddress() {
  const match = location.hash.match(/^#token=([^&/]+)/);
  if (!match) return;
  useToken(decodeURIComponent(match[1]));
  history.replaceState(null, "", location.pathname);
}

function headers() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function ask(path, signal) {
  const answer = await fetch(`api/${path}`, { headers: headers(), signal });
  if (answer.status === 401) throw new TokenNeeded();
  if (!answer.ok) {
    const reason = await answer.json().catch(() => ({}));
    throw new Error(reason.error ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

export async function get(...parts) {
  return (await ask(parts.map(encodeURIComponent).join("/"))).json();
}

/** For what is written once: steps and trajectories. */
export async function getKept(...parts) {
  const key = parts.join("/");
  if (!kept.has(key)) {
    if (kept.size >= KEPT) kept.delete(kept.keys().next().value);
    kept.set(key, get(...parts));
    kept.get(key).catch(() => kept.delete(key));
  }
  return kept.get(key);
}

export function stepName(step, part) {
  return part ? `${step}.${part}` : String(step);
}

/** Server-sent events over fetch: an EventSource could not send the token. Returns a function that ends it. */
export function listen(run, position, onEvent, onState) {
  const control = new AbortController();
  let at = position;
  const once = async () => {
    const answer = await ask(
      `run/${encodeURIComponent(run)}/events?position=${encodeURIComponent(at)}`,
      control.signal,
    );
    onState(true);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        const news = JSON.parse(event.slice(6));
        at = news.position;
        onEvent(news);
      }
    }
  };
  (async () => {
    while (!control.signal.aborted) {
      await once().catch(() => {});
      if (control.signal.aborted) return;
      onState(false);
      await new Promise((resolve) => setTimeout(resolve, 3000));
    }
  })();
  return () => control.abort();
}
