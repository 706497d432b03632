"use strict";
// A chat over the server's own API. No build step, no library; all text goes into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
let messages = [];
let running = null; // the AbortController of the answer that is being streamed

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function showModel() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const model = (await response.json()).data[0];
    $("model").textContent = `${model.id}, context of ${model.max_model_len} tokens`;
  } catch (error) {
    $("model").textContent = error.message;
  }
}

function addMessage(kind, who, text = "") {
  $("empty")?.remove();
  const article = document.createElement("article");
  article.className = `message ${kind}`;
  const label = document.createElement("span");
  label.className = "who";
  label.textContent = who;
  const content = document.createElement("span");
  content.className = "text";
  content.textContent = text;
  article.append(label, content);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, content };
}

function appendMarks(content, marks) {
  for (const mark of marks) {
    const last = content.lastElementChild;
    const kind = mark.drafted ? "drafted" : "base";
    if (last && last.className === kind) {
      last.textContent += mark.text;
    } else {
      const span = document.createElement("span");
      span.className = kind;
      span.textContent = mark.text;
      content.append(span);
    }
  }
}

function requestBody() {
  const stop = $("stop-strings").value.split("\n").filter((line) => line !== "");
  const system = $("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    max_tokens: Math.max(1, Math.trunc(Number($("max-tokens").value)) || 256),
    ...(stop.length ? { stop } : {}),
    stream: true,
    stream_options: { include_usage: true },
    medusa: { speculate: $("speculate").checked, marks: true, statistics: true },
  };
}

// Server-sent events of a response, as objects.
async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

class Figures {
  constructor(speculate) {
    Object.assign(this, { speculate, tokens: 0, accepted: 0, steps: 0, started: performance.now(), first: null });
  }

  count(marks) {
    this.first ??= performance.now();
    this.tokens += marks.num_tokens;
    this.accepted += marks.num_drafted_accepted;
    this.steps += marks.num_tokens ? 1 : 0;
    this.show();
  }

  // The first token comes from the prompt's own pass, not from a step.
  get speed() {
    const seconds = (performance.now() - this.first) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  get tau() {
    return this.steps > 1 ? (this.tokens - 1) / (this.steps - 1) : null;
  }

  show() {
    const number = (value, digits) => (value === null ? "–" : value.toFixed(digits));
    $("speed").textContent = number(this.speed, 1);
    $("tau").textContent = number(this.tau, 2);
    $("share").textContent = this.tokens ? `${Math.round((100 * this.accepted) / this.tokens)} %` : "–";
    $("first").textContent = this.first ? `${Math.round(this.first - this.started)} ms` : "–";
    const row = this.speculate ? "on" : "off";
    $(`${row}-speed`).textContent = number(this.speed, 1);
    $(`${row}-tau`).textContent = number(this.tau, 2);
    $("compare").hidden = false;
  }
}

async function answer(figures, view) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify(requestBody()), signal: running.signal };
  const response = await fetch("/v1/chat/completions", options);
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (!choice?.medusa) continue;
    const atEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
    appendMarks(view.content, choice.medusa.marks);
    figures.count(choice.medusa);
    if (atEnd) $("log").scrollTop = $("log").scrollHeight;
  }
}

async function send() {
  const prompt = $("prompt").value.trim();
  if (!prompt || running) return;
  const chat = messages; // "New chat" begins another one
  chat.push({ role: "user", content: prompt });
  addMessage("user", "You", prompt);
  $("prompt").value = "";
  const view = addMessage("assistant", $("speculate").checked ? "Model" : "Model, without speculation");
  const figures = new Figures($("speculate").checked);
  running = new AbortController();
  setBusy(true, view);
  try {
    await answer(figures, view);
    $("status").textContent = `Answer complete: ${figures.tokens} tokens.`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("status").textContent = stopped ? `Stopped after ${figures.tokens} tokens.` : "The request failed.";
    if (!stopped) addMessage("error", "Error", error.message).article.setAttribute("role", "alert");
  }
  setBusy(false, view);
  running = null;
  if (view.content.textContent) {
    chat.push({ role: "assistant", content: view.content.textContent });
  } else {
    chat.pop(); // a question without an answer is not sent again
    view.article.remove();
  }
}

function setBusy(busy, view) {
  view.article.setAttribute("aria-busy", String(busy));
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  if (busy) $("status").textContent = "Answering …";
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
  $("status").textContent = "New chat.";
  $("prompt").focus();
});
$("temperature").addEventListener("input", () => ($("temperature-value").textContent = $("temperature").value));
$("marks").addEventListener("change", () => document.body.classList.toggle("unmarked", !$("marks").checked));
$("key").addEventListener("change", showModel);
showModel();
