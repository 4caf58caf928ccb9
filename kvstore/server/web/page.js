"use strict";
// What names say is never taken for markup: all of it comes in as text.

const EVERY_MS = 5000, GIVE_UP_MS = 8000, POINTS = 60, NAME_MAX = 80;
const SVG = "http://www.w3.org/2000/svg";
const main = document.getElementById("main"), head = document.getElementById("head");
const fresh = document.getElementById("fresh"), pause = document.getElementById("pause");
const opened = new Set();
let isPaused = false, timer = 0;

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.map((each) => (each instanceof Node ? each : String(each))));
  return made;
}

function drawn(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function plain(text) {
  // What does not show, or turns the direction of what follows, is written as its number.
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu,
    (each) => "\\u" + each.codePointAt(0).toString(16).padStart(4, "0"));
}

function tierName(name) { return name === "dram" ? "memory" : plain(name); }

function modelName(id) {
  // A long name has its middle cut out, for its ends tell names apart; kvstore models has it whole.
  const all = [...String(id)];
  return plain(all.length > NAME_MAX ? [...all.slice(0, NAME_MAX - 20), "...", ...all.slice(-17)].join("") : id);
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) { count /= 1024; place += 1; }
  return (place && count < 10 ? count.toFixed(1) : Math.round(count).toString()) + " " + units[place];
}

function whole(count) { return count.toLocaleString("en"); }
function rate(count) { return count < 1 ? "-" : bytes(count) + "/s"; }

function span(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= size) return (seconds / size).toFixed(unit === "min" ? 0 : 1) + " " + unit;
  return Math.round(seconds) + " s";
}

function table(label, columns, rows, empty) {
  if (!rows.length) return el("p", { class: "note" }, empty);
  const heads = columns.map(([name, kind]) => el("th", { scope: "col", class: kind || "" }, name));
  const body = rows.map((row) => el("tr", {}, ...row.map((value, place) => {
    const kind = columns[place][1] || "";
    return place ? el("td", { class: kind }, value) : el("th", { scope: "row", class: "name" }, value);
  })));
  const made = el("table", {}, el("caption", {}, label), el("thead", {}, el("tr", {}, ...heads)),
    el("tbody", {}, ...body));
  return el("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, made);
}

function tiers(tenant, id) {
  const rows = tenant.tiers.map((tier) => {
    const share = tier.capacity_bytes ? Math.min(1, tier.allocated_bytes / tier.capacity_bytes) : null;
    const full = el("span", {});
    if (share === null) full.append(tier.allocated_bytes ? bytes(tier.allocated_bytes) : "not told");
    else full.append(
      el("meter", { min: 0, max: 1, value: share, "aria-label": tierName(tier.name) + " is full to" }),
      ` ${Math.round(share * 100)} % of ${bytes(tier.capacity_bytes)}`);
    const is_well = tier.health === "up";
    return [tierName(tier.name), el("span", { class: is_well ? "" : "bad" }, plain(tier.health)), full,
      tier.is_shared ? "" : whole(tier.chunk_count), rate(tier.in_bytes_per_s), rate(tier.out_bytes_per_s),
      whole(tier.backlog_count), tier.durability.toLowerCase()];
  });
  const columns = [["Tier"], ["State"], ["Full"], ["Chunks", "n"], ["In", "n"], ["Out", "n"], ["Waiting", "n"],
    ["Survives"]];
  return table(`Tiers of ${id}, flows of the last interval`, columns, rows, "There is no tier.");
}

function grouped(flows, name, size) {
  const found = [];
  for (let at = flows[name].length; at > 0; at -= size)
    found.unshift(flows[name].slice(Math.max(0, at - size), at).reduce((one, other) => one + other, 0));
  return found;
}

function hour(tenant, interval, id) {
  const flows = tenant.flows, size = Math.max(1, Math.ceil(360 / POINTS));
  const hits = grouped(flows, "fetch_hit_chunks", size), misses = grouped(flows, "fetch_miss_chunks", size);
  const went = grouped(flows, "fetch_bytes", size), came = grouped(flows, "store_committed_bytes", size);
  const spared = grouped(flows, "served_milliseconds", size);
  const sooner = grouped(flows, "partial_prefill_saved_milliseconds", size);
  const all = (list) => list.reduce((one, other) => one + other, 0);
  const asked = all(hits) + all(misses);
  const words = asked
    ? `${Math.round((100 * all(hits)) / asked)} % of ${whole(asked)} chunks that fetches asked for were hits.`
    : "No fetch in this time.";
  const told = span(flows.fetch_bytes.length * interval);
  const found = el("div", {}, el("p", {}, `The last ${told}: ${words} ${bytes(all(went))} were handed out, `
    + `${bytes(all(came))} stored.` + (all(spared) ? ` Prefill saved: ${short(all(spared))}.` : "")
    + (all(sooner) ? ` First tokens of planned prefills came ${short(all(sooner))} sooner.` : "")));
  if (asked) {
    const svg = drawn("svg", { class: "hour", viewBox: "0 0 60 100", preserveAspectRatio: "none", role: "img",
      "aria-label": `Hit rate of ${id} over the last ${told}. The table below has the numbers.` });
    for (const height of [25, 50, 75]) svg.append(drawn("line", { x1: 0, x2: 60, y1: height, y2: height }));
    let d = "", was = false;
    hits.forEach((count, place) => {
      const total = count + misses[place], x = POINTS - hits.length + place;
      if (total) {
        const y = (97 - (94 * count) / total).toFixed(1);
        d += was ? `L${x + 0.5} ${y}` : `M${x} ${y}L${x + 0.5} ${y}`;
      }
      was = total > 0;
    });
    svg.append(drawn("path", { d }));
    found.append(svg, el("div", { class: "axis", "aria-hidden": "true" }, el("span", {}, "an hour ago"),
      el("span", {}, "hit rate, 0 to 100 %"), el("span", {}, "now")));
  }
  const rows = hits.map((count, place) => {
    const total = count + misses[place];
    return [span((hits.length - place) * size * interval) + " ago", whole(count), whole(misses[place]),
      total ? Math.round((100 * count) / total) + " %" : "-", bytes(went[place]), bytes(came[place]),
      short(spared[place]), short(sooner[place])];
  }).reverse();
  const more = el("details", { "data-key": id + " hour" }, el("summary", {}, "Numbers of the hour"),
    table(`Fetches and stores of ${id}`, [["Since"], ["Hits", "n"], ["Misses", "n"], ["Hit rate", "n"], ["Out", "n"],
      ["In", "n"], ["Prefill saved", "n"], ["First tokens sooner", "n"]], rows, "Nothing yet."));
  found.append(more);
  return found;
}

function brief(seconds) {
  return seconds < 1 ? (1e3 * seconds).toFixed(seconds < 0.1 ? 1 : 0) + " ms" : seconds.toFixed(2) + " s";
}

function short(ms) { return ms ? (ms < 60e3 ? brief(ms / 1e3) : span(ms / 1e3)) : "-"; }

function timeline(plan, took) {
  // Above: what the engine computes. Below: the load. The stroke: when the first token came.
  const most = Math.max(plan.prefill_s, plan.ttft_s, took ? took.ttft_s : 0) || 1, at = (s) => (100 * s) / most;
  const words = plan.bars.map(([what, begin, end]) => `${what} from ${brief(begin)} to ${brief(end)}`);
  words.push(`a plain prefill would take ${brief(plan.prefill_s)}`);
  const svg = drawn("svg", { class: "plan", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img",
    "aria-label": `Planned: ${words.join(", ")}.` + (took ? ` First token after ${brief(took.ttft_s)}.` : "") });
  svg.append(drawn("rect", { class: "plain", x: 0, width: at(plan.prefill_s), y: 9, height: 2 }));
  for (const [what, begin, end] of plan.bars) {
    const isLoad = what === "load";
    svg.append(drawn("rect", { class: isLoad ? "load" : "compute", x: at(begin), y: isLoad ? 12 : 2,
      width: Math.max(0.5, at(end - begin)), height: 6 }));
  }
  if (took) svg.append(drawn("line", { x1: at(took.ttft_s), x2: at(took.ttft_s), y1: 0, y2: 20 }));
  return svg;
}

function accuracy(plans) {
  // Who only observes loads all that is stored, whatever was planned.
  const compared = plans.filter((each) => each.state === "done" && each.planned && each.planned.is_measured
    && each.planned.is_carried_out && each.took && each.took.ttft_s);
  if (!compared.length) return "None of these was planned with a measured engine, carried out and ended: nothing to compare.";
  const off = compared.map((each) => Math.abs(each.took.ttft_s - each.planned.ttft_s) / each.took.ttft_s)
    .sort((one, other) => one - other);
  const loads = compared.filter((each) => each.planned.load_stop > each.planned.load_start);
  const gain = loads.reduce((sum, each) => sum + each.planned.prefill_s - each.took.ttft_s, 0);
  const words = `Of ${compared.length} that were carried out, half were off by ${Math.round(100 * off[off.length >> 1])} % or less.`;
  return loads.length ? `${words} Loading saved ${gain.toFixed(2)} s before first tokens.` : words;
}

function plans(tenant, now, id) {
  if (!tenant.plans.length) return el("p", { class: "note" },
    "No partial prefill was begun since the start: engines begin them with client.partial_prefill.");
  const rows = tenant.plans.map((each) => {
    const plan = each.planned, took = each.took, isTold = plan && plan.is_measured;
    const loads = !plan ? "no plan asked for" : plan.way === "blend" ? `blend: ${whole(plan.load_stop)} tokens`
      : plan.load_stop > plan.load_start
      ? `${plain(plan.way)}: ${whole(plan.load_start)} to ${whole(plan.load_stop)}` : plain(plan.way);
    return [whole(each.number), isTold ? timeline(plan, took) : "engine not measured", loads,
      isTold ? brief(plan.ttft_s) : "-", took ? brief(took.ttft_s) : "-", took ? brief(took.wait_s) : "-",
      el("span", { class: each.state === "given up" ? "bad" : "" }, each.state), plan ? whole(plan.token_count) : "-",
      whole(each.stored_token_count), modelName(each.model_id), span(Math.max(0, now - each.at_s)) + " ago"];
  });
  return el("div", {}, el("p", {}, accuracy(tenant.plans)),
    el("p", { class: "note" }, "In each timeline: ", el("span", { class: "key compute" }, "computed"), " above, ",
      el("span", { class: "key load" }, "loaded"), " below, the thin bar is a plain prefill, and the stroke is the "
      + "measured first token. kvstore plans --number has every candidate."),
    table(`The last ${rows.length} plans of ${id}`, [["Plan"], ["Timeline"], ["Loads", "name"], ["Planned", "n"],
      ["Took", "n"], ["Waited", "n"], ["Became"], ["Tokens", "n"], ["Stored", "n"], ["Model", "name"], ["Began", "n"]],
      rows, ""));
}

function saved(seconds) { return seconds ? span(seconds) : "not known"; }

function served(tenant, now, id) {
  // Hours in which nothing was fetched are not told.
  const told = new Map(tenant.served_hours.map((each) => [each[0], each])), hours = [];
  const last = Math.floor(now / 3600) * 3600;
  for (let start = last - 23 * 3600; start <= last; start += 3600) hours.push(told.get(start) || [start, 0, 0, 0]);
  const sum = (place) => hours.reduce((one, each) => one + each[place], 0);
  if (!sum(2)) return el("p", { class: "note" }, "Nothing was fetched in the last 24 hours.");
  const found = el("div", {}, el("p", {}, `In 24 hours ${whole(sum(2))} tokens were fetched and not computed`
    + (sum(3) ? `, which saved ${span(sum(3))} of prefill.`
      : ". How much prefill that saved is not known: no engine has told how long its prefills take.")));
  const most = Math.max(...hours.map((each) => each[2]));
  const svg = drawn("svg", { class: "hour", viewBox: "0 0 24 100", preserveAspectRatio: "none", role: "img",
    "aria-label": `Tokens of ${id} that were not computed, by hour. The table below has the numbers.` });
  hours.forEach((each, place) => {
    const height = (94 * each[2]) / most;
    svg.append(drawn("rect", { x: place + 0.1, width: 0.8, y: 97 - height, height }));
  });
  found.append(svg, el("div", { class: "axis", "aria-hidden": "true" }, el("span", {}, "23 hours ago"),
    el("span", {}, `tokens by hour, at most ${whole(most)}`), el("span", {}, "this hour")));
  const rows = hours.filter((each) => each[2]).reverse().map((each) => [span(Math.max(0, now - each[0])) + " ago",
    whole(each[1]), whole(each[2]), saved(each[3])]);
  found.append(el("details", { "data-key": id + " served" }, el("summary", {}, "Numbers by hour"),
    table(`What ${id} did not compute`, [["Hour began"], ["Fetches", "n"], ["Tokens", "n"], ["Prefill saved", "n"]],
      rows, "")));
  return found;
}

function heat(tenant, id, digests) {
  if (!tenant.hot.length) return el("p", { class: "note" }, "No prefix that is stored was fetched of late.");
  const most = tenant.hot[0].heat, top = el("ul", { class: "tree", "aria-label": `Hottest prefixes of ${id}` });
  const items = tenant.hot.map((each) => {
    const ends = each.own_heat >= 0.05 && each.own_heat < each.heat - 0.05
      ? `, of which ${each.own_heat.toFixed(1)} ended here` : "";
    const line = el("span", { class: "hot" },
      el("meter", { min: 0, max: most, value: each.heat, "aria-hidden": "true" }),
      ` heat ${each.heat.toFixed(1)}${ends}: the first ${whole(each.token_count)} tokens, `
      + (each.tier ? `in ${tierName(each.tier)}` : "not stored any more")
      + (each.above < 0 ? `, ${modelName(each.model_id || "a model that nobody registered")}` : ""));
    if (each.digest) line.append(" ", el("code", {}, each.digest));
    return el("li", {}, line);
  });
  tenant.hot.forEach((each, place) => {
    if (each.above < 0) { top.append(items[place]); return; }
    const above = items[each.above];
    if (!above.querySelector(":scope > ul")) above.append(el("ul", {}));
    above.querySelector(":scope > ul").append(items[place]);
  });
  const how = "Each fetch adds 1 to the heat of its prefix and of what that goes on from; after an hour it counts half. ";
  return el("div", {}, el("p", { class: "note" }, how + (digests ? "kvstore show has the chunk of each digest."
    : "Digests are shown to those who have a token of server.metrics_token_file; kvstore top has them, too.")), top);
}

function models(tenant, id) {
  const rows = tenant.models.map((model) => [modelName(model.model_id), model.fingerprint, whole(model.chunk_count),
    bytes(model.byte_count), whole(model.served_tokens), model.served_tokens ? saved(model.saved_seconds) : "-"]);
  const label = tenant.model_count > rows.length ? `The ${rows.length} largest of ${tenant.model_count} models of ${id}`
    : `Models of ${id}`;
  return table(label, [["Model"], ["Fingerprint"], ["Chunks", "n"], ["Bytes", "n"], ["Not computed, 48 h", "n"],
    ["Prefill saved", "n"]], rows,
    "No engine has registered a model.");
}

function health(tenant, id, now) {
  const wrong = tenant.tiers.filter((tier) => tier.health !== "up")
    .map((tier) => `${tierName(tier.name)}: ${plain(tier.health)}`).concat(tenant.absent.map(plain));
  if (tenant.quarantined_chunks)
    wrong.push(`${whole(tenant.quarantined_chunks)} chunks failed their checks since the start: kvstore verify`);
  const found = el("div", {}, wrong.length
    ? el("ul", {}, ...wrong.map((each) => el("li", { class: "bad" }, each)))
    : el("p", {}, "All tiers are up, and no chunk failed its check."));
  const rows = tenant.events.slice().reverse().map((event) => [span(Math.max(0, now - event.at_s)) + " ago",
    tierName(event.tier), plain(event.text)]);
  if (rows.length) found.append(el("details", { "data-key": id + " health" },
    el("summary", {}, `What changed: ${rows.length} events`),
    table(`Health of ${id}`, [["When"], ["Tier"], ["From then on"]], rows, "")));
  return found;
}

function section(tenant, facts) {
  const id = `tenant ${plain(tenant.name)}`;
  return el("section", { "aria-label": id },
    el("h2", {}, `Tenant ${plain(tenant.name)}`),
    el("p", { class: "note" }, `${whole(tenant.chunk_count)} chunks in memory, ${whole(tenant.session_count)} sessions, `
      + `${bytes(tenant.leased_bytes)} leased, ${bytes(tenant.pinned_bytes)} pinned`),
    el("h3", {}, "Health"), health(tenant, id, facts.now_s),
    el("h3", {}, "Tiers"), tiers(tenant, id),
    el("h3", {}, "Hits over the last hour"), hour(tenant, facts.interval_s, id),
    el("h3", {}, "Tokens that were not computed"), served(tenant, facts.now_s, id),
    el("h3", {}, "Recent plans"), plans(tenant, facts.now_s, id),
    el("h3", {}, "Hottest prefixes"), heat(tenant, id, facts.shows_digests),
    el("h3", {}, "Models"), models(tenant, id));
}

function show(facts) {
  head.textContent = `Release ${plain(facts.version)}, up ${span(facts.up_s)}, ${facts.tenant_count} tenant`
    + (facts.tenant_count === 1 ? "" : "s");
  for (const each of main.querySelectorAll("details[data-key]"))
    each.open ? opened.add(each.dataset.key) : opened.delete(each.dataset.key);
  const held = document.activeElement, regions = [...main.querySelectorAll("[tabindex='0'], summary")];
  const place = regions.indexOf(held);
  const scrolled = [...main.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  main.replaceChildren(...facts.tenants.map((each) => section(each, facts)));
  if (facts.tenant_count > facts.tenants.length)
    main.append(el("p", { class: "note" }, `${facts.tenant_count - facts.tenants.length} tenants more: kvstore status`));
  for (const each of main.querySelectorAll("details[data-key]")) each.open = opened.has(each.dataset.key);
  main.querySelectorAll(".scroll").forEach((each, at) => { each.scrollLeft = scrolled[at] || 0; });
  if (place >= 0) main.querySelectorAll("[tabindex='0'], summary")[place]?.focus({ preventScroll: true });
}

function say(words) { if (fresh.textContent !== words) fresh.textContent = words; }

async function look() {
  try {
    const reply = await fetch("page.json", { cache: "no-store", signal: AbortSignal.timeout(GIVE_UP_MS) });
    if (!reply.ok) throw new Error((await reply.text()).trim() || `status ${reply.status}`);
    show(await reply.json());
    say(`Read every ${EVERY_MS / 1000} s`);
  } catch (error) {
    say(`No answer, trying again: ${plain(error.message)}`);
  }
  if (!isPaused) timer = setTimeout(look, document.hidden ? 6 * EVERY_MS : EVERY_MS);
}

pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.setAttribute("aria-pressed", String(isPaused));
  clearTimeout(timer);
  if (isPaused) say("Paused"); else look();
});
look();
