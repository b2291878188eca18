// The page of `ralo serve`: answers as they are made, modes beside dense, and the server's live figures.

const POLL_MS = 1000, PAST = 60; // figures that the line of speeds has
const SHARES = { // what a mode keeps, by its metric's name (ralo.metrics)
  "kwta.keep_ratio": "channels used",
  "event.topk_kept": "channels sent, keys read",
  "pack.density": "neurons active, keys read",
  "proc.mem_ratio": "memory beside bf16",
  "mix.mem_ratio": "bytes beside finer weights",
};
const LABELS = { modes: "With modes", dense: "Dense" };
const ENDS = { stop: "", length: ", cut at its limit" };

const byId = (id) => document.getElementById(id);
const messages = byId("messages"), prompt = byId("prompt"), send = byId("send"), live = byId("live");
const turns = []; // {asked, answers, chosen, element}
const models = {}; // by way: modes, dense
let stopping = null; // AbortController of what is under way
let key = sessionStorage.getItem("ralo-key") ?? "";

const shortly = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const number = (value) => shortly.format(value);
const percent = (value) => `${shortly.format(100 * value)} %`;
const counted = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;

/** An element; text is always text, whatever is in it. */
function make(tag, look = "", text = "") {
  const element = document.createElement(tag);
  if (look) element.className = look;
  element.textContent = text;
  return element;
}

function say(id, text) { // only what changed: a screen reader repeats what is set again
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
  if (id.endsWith("note")) element.hidden = !text;
}

// --- the server ---

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const again = response.headers.get("Retry-After");
  const what = body?.error?.message ?? `The server answered ${response.status}.`;
  throw new Refused(response.status, again ? `${what} (in about ${again} s)` : what);
}

/** The bodies of server-sent events. */
async function* events(response) {
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new Refused(0, "The connection ended before the answer did.");
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function loadModels() {
  try {
    const { data } = await (await call("/v1/models")).json();
    models.modes = data[0].id;
    models.dense = data.find(({ id }) => id === `${models.modes}:dense`)?.id;
  } catch (error) {
    if (error.status === 401) askForKey();
    say("switch-note", error.status === 401 ? "" : error.message);
    return;
  }
  byId("key-form").hidden = true;
  byId("switch").disabled = !models.dense;
  say("switch-note", models.dense ? "" :
    "This server was started without modes, so every answer is dense. " +
    "ralo serve --plan FILE, or a mode's flag such as --kwta-k 0.5, gives something to compare.");
  if (!models.dense) document.querySelector("[name=way][value=dense]").checked = true;
  document.title = `${models.modes} · ralo`;
  say("model", models.modes);
}

function askForKey() {
  const form = byId("key-form"), shown = !form.hidden;
  say("key-note", key ? "That key was refused." : "This server asks for a key. It is forgotten with this tab.");
  form.hidden = false;
  if (!shown || key) byId("key").focus();
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("ralo-key", key);
  await loadModels();
  if (models.modes) {
    prompt.focus();
    poll();
  }
});

// --- the conversation ---

/** One answer on the page. */
class Answer {
  constructor(way, parent) {
    this.way = way;
    this.words = "";
    this.written = 0; // characters of `words` that the page shows
    this.pieces = 0;
    this.element = make("section", `answer ${way}`);
    this.title = make("h3", "", LABELS[models.dense ? way : "dense"]);
    this.text = make("p", "text");
    this.figures = make("p", "note");
    this.element.append(this.title, this.text, this.figures);
    parent.append(this.element);
  }

  begin() {
    this.element.classList.add("growing");
    this.figures.textContent = "";
    this.begun = performance.now();
  }

  add(words) {
    const now = performance.now();
    this.first ??= now;
    this.last = now;
    this.pieces += 1;
    this.words += words;
    this.frame ??= requestAnimationFrame(() => { // not at every token: laying out leaves no time for buttons
      this.write();
      this.show(this.pieces, "");
    });
  }

  /** Words that came since the last frame. */
  write() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const follow = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
    this.text.append(this.words.slice(this.written));
    this.written = this.words.length;
    if (follow) messages.scrollTop = messages.scrollHeight;
  }

  /** `end`: how it ended, in words. The first token waits for the prompt, so speed is that of those after it; of an
   * answer that came in one piece, of all. */
  show(tokens, end) {
    const whole = this.last === this.first;
    const seconds = (this.last - (whole ? this.begun : this.first)) / 1000;
    const speed = tokens > 1 && seconds > 0 ? ` · ${number((whole ? tokens : tokens - 1) / seconds)} tokens/s` : "";
    this.figures.textContent = `${counted(tokens, "token")}${speed}${end}`;
  }

  end(tokens, end) {
    this.write();
    this.element.classList.remove("growing");
    this.show(tokens ?? this.pieces, end);
  }

  fail(message) {
    this.write();
    this.element.classList.remove("growing");
    const line = make("p", "trouble", message);
    line.setAttribute("role", "alert");
    this.element.append(line);
  }
}

async function answer(one, body) {
  one.begin();
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, model: models[one.way] ?? "" }),
    signal: stopping.signal,
  });
  let tokens, finish = "";
  for await (const event of events(response)) {
    if (event.error) throw new Refused(500, event.error.message);
    for (const choice of event.choices) {
      if (choice.delta.content) one.add(choice.delta.content);
      finish = choice.finish_reason ?? finish;
    }
    tokens = event.usage?.completion_tokens ?? tokens;
  }
  one.end(tokens, ENDS[finish] ?? "");
}

function history() {
  return turns.flatMap(({ asked, answers, chosen }) => answers[chosen].words ? [
    { role: "user", content: asked },
    { role: "assistant", content: answers[chosen].words },
  ] : []); // what had no answer is not told again
}

function settings() {
  const value = (id) => byId(id).value === "" ? undefined : byId(id).valueAsNumber;
  return {
    temperature: value("temperature"),
    max_tokens: value("max-tokens"),
    seed: value("seed") ?? Math.floor(Math.random() * 2 ** 31), // the same for both where two are asked
    stream: true,
    stream_options: { include_usage: true },
  };
}

function newTurn(asked, way) {
  byId("empty").hidden = true;
  const element = make("article", "turn"), question = make("div", "asked"), answers = make("div", "answers");
  question.append(make("h3", "unseen", "You"), make("p", "text", asked));
  answers.classList.toggle("both", way === "both");
  element.append(question, answers);
  messages.append(element);
  const ways = way === "both" ? ["modes", "dense"] : [way];
  return { asked, element, chosen: 0, answers: ways.map((one) => new Answer(one, answers)) };
}

async function ask() {
  const asked = prompt.value.trim();
  const wrong = [...document.querySelectorAll("#settings input")].find((input) => !input.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.reportValidity();
    return;
  }
  if (!asked || stopping) return;
  const body = { messages: [...history(), { role: "user", content: asked }], ...settings() };
  const turn = newTurn(asked, document.querySelector("[name=way]:checked").value);
  turns.push(turn);
  prompt.value = "";
  busy(true);
  if (turn.answers.length > 1) turn.answers[1].figures.textContent = "waits, so that each has the CPU to itself";
  for (const one of turn.answers) await attempt(one, body);
  busy(false);
  settle(turn);
}

async function attempt(one, body) {
  try {
    if (stopping.signal.aborted) one.end(0, ", stopped");
    else await answer(one, body);
  } catch (error) {
    if (error.name === "AbortError") one.end(one.pieces, ", stopped"); // pieces: the server's count comes at the end
    else one.fail(error.message);
    if (error.status === 401) askForKey();
  }
}

/** The turn is over: which answer the next one goes on from, and a question that had none comes back. */
function settle(turn) {
  if (!turns.includes(turn)) return; // cleared meanwhile
  turn.chosen = Math.max(0, turn.answers.findIndex(({ words }) => words));
  if (turn.answers.every(({ words }) => !words) && !prompt.value) prompt.value = turn.asked;
  const parts = turn.answers.map(({ title, figures }) => [title.textContent, figures.textContent || "no answer"]);
  say("state", parts.length > 1 ? parts.map((part) => part.join(": ")).join("; ") : parts[0][1]);
  if (turn.answers.every(({ words }) => words) && turn.answers.length > 1) offerChoice(turn);
  messages.scrollTop = messages.scrollHeight;
}

function offerChoice(turn) {
  const buttons = turn.answers.map((one, i) => {
    const button = make("button", "", "Go on from this one");
    button.type = "button";
    button.setAttribute("aria-label", `Go on from this one: ${one.title.textContent}`);
    button.addEventListener("click", () => {
      turn.chosen = i;
      buttons.forEach((other, j) => other.setAttribute("aria-pressed", i === j));
    });
    button.setAttribute("aria-pressed", i === turn.chosen);
    one.element.append(button);
    return button;
  });
}

function busy(on) {
  stopping = on ? new AbortController() : null;
  messages.setAttribute("aria-busy", on); // an answer is read out when it is whole
  send.textContent = on ? "Stop" : "Send";
  send.classList.toggle("stop", on);
  if (on) {
    say("state", "Answering …");
    messages.scrollTop = messages.scrollHeight;
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopping) stopping.abort();
  else ask();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (stopping) stopping.abort();
  else if (live.classList.contains("open")) toggleLive();
});

byId("clear").addEventListener("click", () => {
  stopping?.abort();
  for (const { element } of turns.splice(0)) element.remove();
  byId("empty").hidden = false;
  say("state", "Cleared.");
  prompt.focus();
});

// --- the live figures ---

const past = { speed: [], read: [] }; // the latest last
let timer = 0, polling = false;

async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  let again = true;
  try {
    if (!models.modes) await loadModels();
    if (models.modes) showFigures(await (await call("/live")).json());
    say("live-state", "");
  } catch (error) {
    again = error.status !== 401;
    if (error.status === 401) askForKey();
    say("live-state", error.message);
  }
  polling = false;
  if (again && byId("key-form").hidden) timer = setTimeout(poll, POLL_MS);
}

function showFigures(now) {
  say("brief", `: ${number(now.tokens_per_s)} tokens/s`);
  showLine("speed", now.tokens_per_s, "Tokens per second");
  showLine("read", now.bytes_per_token / 1e6 || past.read.at(-1), "MB read per token"); // while nothing is read: the last
  say("running", number(now.running));
  say("waiting", number(now.waiting));
  say("kept-texts", number(now.cache_bytes / 1e6));
  const names = Object.keys(now.modes);
  say("model", [models.modes, ...names].join(" · "));
  showModes(now);
  showLayers(now);
  showGuard(now, names.length > 0);
}

/** A figure and its last minute; undefined where there is none yet. */
function showLine(name, value, title) {
  if (value === undefined) return;
  const values = past[name];
  values.push(value);
  if (values.length > PAST) values.shift();
  const most = Math.max(...values), left = PAST - values.length;
  const points = values.map((one, i) => `${left + i},${(19 - 18 * one / (most || 1)).toFixed(1)}`);
  byId(`${name}-past`).firstElementChild.setAttribute("points", points.join(" "));
  byId(`${name}-past`).setAttribute("aria-label", `${title} in the last minute: at most ${number(most)}`);
  say(name, number(value));
}

/** As many children as there are items; those that are there already are kept, so that a reader's place is too. */
function fill(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, i) => update(parent.children[i], item));
}

function showModes({ modes, metrics }) {
  const compared = metrics["guard.checks"] > 0;
  const create = () => {
    const line = make("li");
    line.append(make("span"), make("span"), make("span"));
    return line;
  };
  fill(byId("modes"), Object.entries(modes), create, (line, [name, { on, gap }]) => {
    const [title, state, quality] = line.children;
    title.textContent = name;
    state.textContent = on ? "on" : "off";
    state.className = on ? "on" : "off";
    quality.textContent = compared ? `quality gap ${percent(gap)}` : "not compared yet";
  });
  say("modes-note", Object.keys(modes).length
    ? "Quality gap: so much would the perplexity of dense's own text rise."
    : "No mode is on: every token reads all weights.");
}

function showLayers({ layers }) {
  const names = Object.keys(SHARES).filter((name) => layers.some((layer) => name in layer));
  const createGroup = () => {
    const group = make("div");
    group.append(make("p", "note"), make("ol", "layers plain"));
    return group;
  };
  fill(byId("layers"), names, createGroup, (group, name) => {
    const [title, list] = group.children;
    title.textContent = `${name.split(".")[0]}: share of ${SHARES[name]}`;
    fill(list, layers.map((layer) => layer[name]), createLayer, showLayer);
  });
  say("layers-note", names.length ? "Since the start, over all answers." : "Nothing is left out.");
}

function createLayer() {
  const line = make("li"), label = make("span"), bar = make("span", "bar");
  label.append(make("span", "unseen", "layer "), make("span"));
  bar.append(make("i"));
  bar.setAttribute("aria-hidden", "true"); // its value stands beside it
  line.append(label, bar, make("span", "value"));
  return line;
}

function showLayer(line, share) {
  const [label, bar, value] = line.children;
  label.lastElementChild.textContent = [...line.parentElement.children].indexOf(line);
  bar.firstElementChild.style.setProperty("--share", Math.min(share ?? 0, 1));
  value.textContent = share === undefined ? "–" : `${Math.round(100 * share)} %`;
}

function showGuard({ metrics, events: switched }, watching) {
  const checks = metrics["guard.checks"] ?? 0, off = metrics["guard.modes_off"] ?? 0;
  const so = `${counted(checks, "comparison")} with dense; ` + (off ? `${counted(off, "mode")} switched off now.` :
    switched.length ? "all modes are on." : "nothing was switched.");
  say("guard-note", watching ? so : "There is nothing to watch.");
  fill(byId("events"), [...switched].reverse(), () => make("li"), (line, what) => {
    if (line.textContent !== what) line.textContent = what;
  });
}

/** On a phone, which has no room for them beside the chat, nor for the settings at the same time. */
function showLive(on) {
  live.classList.toggle("open", on);
  byId("live-toggle").setAttribute("aria-expanded", on);
  if (on) byId("settings").open = false;
}

function toggleLive() {
  const on = !live.classList.contains("open");
  showLive(on);
  (on ? live : byId("live-toggle")).focus();
}

byId("live-toggle").addEventListener("click", toggleLive);
byId("settings").addEventListener("toggle", () => byId("settings").open && showLive(false));
document.addEventListener("visibilitychange", poll);
poll();
