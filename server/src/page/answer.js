// One answer in the conversation: reasoning, text, tool calls, its way through the server.

import { counted, el, redraw } from "./dom.js";
import { bars, isEnded, progressBar, progressOf, stageText, stagesText } from "./way.js";

export class Answer {
  constructor(turn) {
    this.turn = turn;
    this.message = { role: "assistant", content: "", tool_calls: [] };
    this.reasoning = el("div", { class: "text" });
    this.details = el("details", { class: "reasoning", open: true, hidden: true },
      el("summary", { text: "Reasoning" }), this.reasoning);
    this.content = el("div", { class: "text cursor" });
    this.calls = el("div", { class: "calls" });
    this.way = el("div", { class: "way", hidden: true });
    this.meta = el("div", { class: "meta" });
    this.codes = [];
    this.finish = null;
    this.usage = null;
    // A screen reader waits until the answer is whole instead of reading token by token.
    turn.setAttribute("aria-busy", "true");
    turn.append(this.details, this.content, this.calls, this.way, this.meta);
  }

  /* Takes in one event of the stream; true if it had anything of the answer. */
  take(chunk) {
    if (chunk.error) throw chunk.error;
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      this.add(choice.delta);
      this.finish = choice.finish_reason || this.finish;
    }
    return chunk.choices.length > 0;
  }

  add(delta) {
    const { message } = this;
    if (delta.reasoning_content) {
      message.reasoning_content = (message.reasoning_content || "") + delta.reasoning_content;
      this.details.hidden = false;
      this.reasoning.append(delta.reasoning_content);
    }
    if (delta.content) {
      message.content += delta.content;
      this.content.append(delta.content);
    }
    for (const part of delta.tool_calls || []) {
      if (part.id) this.begin(part);
      message.tool_calls[part.index].function.arguments += part.function.arguments;
      this.codes[part.index].append(part.function.arguments);
    }
  }

  begin({ id, index, function: { name } }) {
    this.message.tool_calls[index] = { id, type: "function", function: { name, arguments: "" } };
    this.codes[index] = el("code");
    const head = el("div", { class: "call-head" }, el("span", { class: "tag", text: "tool call" }), el("b", { text: name }));
    this.calls.append(el("div", { class: "call", role: "group", "aria-label": "Call of the tool " + name }, head, this.codes[index]));
  }

  /* Shows how far the request has come. */
  follow(way) {
    this.way.hidden = false;
    redraw(this.way, way, () => {
      const progress = isEnded(way) ? null : progressOf(way);
      const text = isEnded(way) ? stagesText(way[0]) : [stageText(way), progress?.text].filter(Boolean).join(" · ");
      const bar = progress ? progressBar(progress, "Prompt tokens that are there") : null;
      return [el("div", { class: "small numbers", "data-stage": way[0].stage, text }), bar, ...bars(way)];
    });
  }

  /* The line below the answer; `times` are those of the request, its first token and its end. */
  summarise({ begun, first, ended }) {
    const parts = [this.finish];
    const { usage } = this;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(counted(usage.prompt_tokens, "prompt token") + (cached ? " (" + cached + " cached)" : ""));
      parts.push(usage.completion_tokens + " generated");
      // Of an answer that came in one piece the browser cannot tell how fast it was made.
      if (usage.completion_tokens > 1 && ended - first >= 100) {
        parts.push((1000 * (usage.completion_tokens - 1) / (ended - first)).toFixed(1) + " tokens/s");
      }
    }
    parts.push("first after " + Math.round(first - begun) + " ms");
    this.meta.textContent = parts.join(" · ");
  }

  fail(text) {
    this.turn.append(el("div", { class: "error", role: "alert", text }));
  }

  /* Nothing more will come. */
  end() {
    this.turn.removeAttribute("aria-busy");
    this.content.classList.remove("cursor");
    if (this.content.textContent) this.details.open = false;
    else this.content.remove();
  }

  /* Asks what the tools return, and calls `finish` with the texts. */
  askResults(calls, finish) {
    const inputs = calls.map((call, index) => {
      const input = el("input", { type: "text", placeholder: "what the tool returns", autocomplete: "off" });
      this.calls.children[index].append(el("label", {}, el("span", { text: "Result of " + call.function.name }), input));
      return input;
    });
    const button = el("button", { type: "button", class: "primary", text: inputs.length > 1 ? "Send results" : "Send result" });
    const close = () => {
      button.parentElement.remove();
      for (const input of inputs) input.disabled = true;
      return inputs.map((input) => input.value);
    };
    const go = () => finish(close());
    button.onclick = go;
    inputs.at(-1).onkeydown = (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      go();
    };
    this.calls.append(el("div", { class: "meta" }, button));
    inputs[0].focus();
    return { calls, close };
  }
}
