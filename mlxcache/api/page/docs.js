// The HTTP API as its OpenAPI document describes it.

import { byId, h, setAttr, setText } from "./dom.js";

const METHODS = ["get", "post", "patch", "put", "delete"];
const DEEPEST = 6;

class Schemas {
  constructor(components) {
    this.components = components;
  }

  // The schema behind a reference, and its name.
  find(schema) {
    const name = schema?.$ref?.split("/").pop();
    return name ? { name, schema: this.components[name] ?? {} } : { name: null, schema: schema ?? {} };
  }

  // All alternatives of a schema, without null.
  options(schema) {
    const found = this.find(schema).schema;
    const several = found.anyOf ?? found.oneOf;
    return several ? several.flatMap((one) => this.options(one)).filter((one) => one.type !== "null") : [schema];
  }

  // In words: "text", "list of Message", "1 to 20".
  kind(schema) {
    const words = this.options(schema).map((one) => this.one(one));
    return [...new Set(words)].join(" or ");
  }

  one(schema) {
    const { name, schema: found } = this.find(schema);
    if (found.const !== undefined) return JSON.stringify(found.const);
    if (found.enum) return found.enum.filter((one) => one !== null).map((one) => JSON.stringify(one)).join(", ");
    if (found.type === "array") return `list of ${this.kind(found.items ?? {})}`;
    if (name) return found.title ?? name;
    const type = { string: "text", integer: "whole number", number: "number", boolean: "true or false", object: "object" }[found.type];
    return [type ?? "any", range(found)].filter(Boolean).join(" ");
  }

  // The object schemas in which a field's value is described further.
  below(schema) {
    return this.options(schema).flatMap((one) => {
      const { schema: found } = this.find(one);
      if (found.type === "array") return this.below(found.items ?? {});
      return found.properties ? [found] : [];
    });
  }
}

function range({ minimum, maximum }) {
  if (minimum !== undefined && maximum !== undefined) return `from ${minimum} to ${maximum}`;
  if (minimum !== undefined) return `at least ${minimum}`;
  return maximum !== undefined ? `at most ${maximum}` : "";
}

function fields(schemas, schema, depth = 0) {
  const required = new Set(schema.required ?? []);
  const all = Object.keys(schema.properties ?? {});
  const refused = all.filter((name) => schema.properties[name]["x-unsupported"]);
  const names = all.filter((name) => !refused.includes(name));
  names.sort((a, b) => required.has(b) - required.has(a));
  const rows = names.map((name) => field(schemas, name, schema.properties[name], required.has(name), depth));
  if (refused.length) rows.push(h("li", { class: "soft" }, `Not supported, a 400: ${refused.join(", ")}`));
  return h("ul", { class: "fields" }, ...rows);
}

function field(schemas, name, schema, required, depth) {
  const line = [
    h("code", {}, name),
    h("span", { class: "kind" }, schemas.kind(schema)),
    required ? h("span", { class: "required" }, "required") : null,
  ];
  const below = depth < DEEPEST ? schemas.below(schema) : [];
  if (!below.length) return h("li", {}, ...line);
  const details = h("details", {}, h("summary", {}, ...line));
  // made when opened: types refer to each other
  details.addEventListener("toggle", () => details.append(...below.map((one) => fields(schemas, one, depth + 1))), { once: true });
  return h("li", {}, details);
}

// Text in which `words` between backticks are code.
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

function part(title, ...children) {
  return h("section", {}, h("h3", {}, title), ...children);
}

function operation(schemas, path, method, found) {
  const parts = [];
  if (found.description) parts.push(h("p", { class: "text" }, ...prose(found.description)));
  const given = found.parameters ?? [];
  if (given.length) {
    const properties = Object.fromEntries(given.map((one) => [one.name, one.schema]));
    const required = given.filter((one) => one.required).map((one) => one.name);
    parts.push(part("Path and query", fields(schemas, { properties, required })));
  }
  for (const [type, { schema }] of Object.entries(found.requestBody?.content ?? {})) {
    const below = schema ? schemas.below(schema) : [];
    parts.push(part(`Body, ${type}`, ...below.map((one) => fields(schemas, one))));
  }
  const statuses = Object.entries(found.responses).map(([status, one]) => {
    const types = Object.keys(one.content ?? {}).filter((type) => status < 300);
    return h("li", {}, h("b", {}, status), h("span", {}, [one.description, ...types].join(" ")));
  });
  parts.push(part("Responses", h("ul", { class: "statuses" }, ...statuses)));
  return h(
    "details",
    { class: "operation", id: found.operationId },
    h(
      "summary",
      {},
      h("span", { class: "method", "data-method": method }, method.toUpperCase()),
      h("span", { class: "path" }, path),
      h("span", { class: "summary" }, ...prose(found.summary)),
    ),
    h("div", {}, ...parts),
  );
}

function groups(document) {
  const found = new Map();
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const method of METHODS.filter((one) => one in methods)) {
      const [tag] = methods[method].tags;
      if (!found.has(tag)) found.set(tag, []);
      found.get(tag).push([path, method, methods[method]]);
    }
  }
  return found;
}

function draw(document) {
  const schemas = new Schemas(document.components.schemas);
  setText(byId("version"), document.info.version);
  for (const [tag, operations] of groups(document)) {
    const id = `group-${tag.toLowerCase()}`;
    byId("places").append(h("a", { href: `#${id}` }, tag));
    const list = operations.map((one) => operation(schemas, ...one));
    byId("main").append(h("section", { id }, h("div", { class: "head" }, h("h2", {}, tag)), ...list));
  }
}

function openNamed() {
  const named = location.hash.length > 1 ? byId(decodeURIComponent(location.hash.slice(1))) : null;
  if (named?.tagName === "DETAILS") named.open = true;
  named?.scrollIntoView();
}

async function start() {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`${response.status}`);
  draw(await response.json());
  setText(byId("link"), "");
  byId("link").hidden = true;
  openNamed();
}

addEventListener("hashchange", openNamed);
start().catch((error) => {
  setAttr(byId("link"), "data-state", "lost");
  setText(byId("link"), `The description could not be loaded (${error.message}).`);
});
