// The requests of an engine as a table: those that wait first, with their reasons.

import { seconds } from "./engine_view.js";
import { number, t } from "./texts.js";
import { html } from "./ui.js";

const MOST_ROWS = 60;
// What headings mean that do not say it by themselves.
const HINTS = { left: "requests.leftHint", slack: "requests.slackHint" };

export function RequestTable({ view, pick }) {
  const requests = requestsOf(view);
  const reasons = Object.entries(view.stats?.waiting_by_reason ?? {}).filter(([, count]) => count);
  const rest = Math.max(requests.length, view.isFile ? 0 : view.numRequests) - MOST_ROWS;
  return html`<div class="requests"><h3>${t("requests.title")} <small>${reasons.map(([reason, count]) =>
      t("requests.reason", { count, reason })).join(", ") || t("requests.noneWaits")}</small></h3>
    ${requests.length > 0 && html`<div class="wide" tabindex="0" role="region" aria-label=${t("requests.title")}><table><thead><tr>
      ${["id", "phase", "row", "age", "prompt", "cached", "output", "left", "slack", "preemptions", "why"].map((name) => html`<th key=${name} scope="col"
        title=${HINTS[name] && t(HINTS[name])}>${t(`requests.${name}`)}</th>`)}</tr></thead><tbody>${requests.slice(0, MOST_ROWS).map((request) => html`<tr key=${request.id}>
      <td><button type="button" class="quiet" onClick=${() => pick(request)}><code class="id">${request.id.slice(0, 8)}</code></button></td>
      <td>${t(`phase.${phase(view, request)}`)}</td><td>${request.row < 0 ? "–" : request.row}</td><td>${age(view, request)}</td>
      <td>${count(request.prompt)}</td><td>${count(request.cached)}</td><td>${count(request.output)}</td><td>${count(request.left)}</td>
      <td>${slack(view, request)}</td><td>${count(request.preemptions)}</td>
      <td>${request.row < 0 ? why(request) : ""}</td></tr>`)}
    </tbody></table></div>`}
    ${rest > 0 && html`<p class="hint">${t("requests.more", { count: number.format(rest) })}</p>`}</div>`;
}

// Requests have no deadlines but those that their clients give them.
function slack(view, { deadline }) {
  if (deadline === undefined) return "";
  return deadline ? seconds(Math.max(0, deadline - view.now)) : "–";
}

// A file says only who had rows.
function requestsOf(view) {
  if (view.isFile) return [...view.open.values()].map(({ id, row }) => ({ id, row, prompt: view.lives.get(id)?.prompt }));
  const rank = ({ row }) => (row < 0 ? 0 : 1);
  return [...view.requests].sort((one, other) => rank(one) - rank(other));
}

const count = (value) => (value === undefined ? "" : number.format(value));

function phase(view, { id, row, status, output }) {
  if (row < 0) return status === "preempted" ? "preempted" : "waits";
  return output > 0 || view.lives.get(id)?.first ? "decode" : "prefill";
}

// The reason of one that was preempted says so only until it is looked at again.
function why({ status, reason }) {
  return status === "preempted" && !reason.startsWith("was preempted") ? t("requests.preempted", { reason }) : reason;
}

function age(view, { id }) {
  const arrived = view.lives.get(id)?.arrived;
  return arrived ? seconds(Math.max(0, view.now - arrived)) : "";
}
