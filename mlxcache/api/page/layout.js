// Positions of the prefix tree's nodes: x by tokens, y by branch. Only numbers, no DOM.

export const GAP = 16;
const LEAST = 12;

// Nodes with {row, endRow, x, width, below}, by their order in the tree, and the number of rows.
// Lengths go by the square root, so that a short turn behind a long prefix is still seen.
export function placed(nodes, width) {
  const all = nodes.map((node) => ({ ...node, below: [], row: 0, endRow: 0, x: 0, width: 0 }));
  for (const node of all) if (node.parent !== null) all[node.parent].below.push(node);
  const rows = numberRows(all);
  let scale = fitting(all, width);
  let wide = lengths(all, scale);
  for (let tries = 0; wide > width && tries < 40; tries++) wide = lengths(all, (scale *= 0.94));
  return { nodes: all.slice(1), rows, width: wide };
}

function lengths(all, scale) {
  for (const node of all) {
    const above = node.parent === null ? null : all[node.parent];
    node.x = above && above.parent !== null ? above.x + above.width + GAP : 0;
    node.width = node.parent === null ? 0 : Math.max(LEAST, scale * Math.sqrt(node.tokens));
  }
  return Math.max(...all.map((node) => node.x + node.width));
}

// The first child goes on in its parent's row, each other one has a row of its own below. Whoever
// ends where others go on has one too, so that its name is not among theirs.
function numberRows(all) {
  let next = 0;
  const visit = (node, row) => {
    node.row = row;
    next = Math.max(next, row + 1);
    node.below.forEach((one, i) => visit(one, i === 0 && node.parent !== null ? row : next));
    node.endRow = node.ends.length && node.below.length ? next++ : row;
  };
  visit(all[0], -1);
  return next;
}

// Pixels per root of a token with which the longest path fits.
function fitting(all, width) {
  const roots = new Map();
  const gaps = new Map();
  let found = Infinity;
  for (const node of all) {
    roots.set(node.id, (roots.get(node.parent) ?? 0) + Math.sqrt(node.tokens));
    gaps.set(node.id, (gaps.get(node.parent) ?? -GAP) + (node.parent === null ? 0 : GAP));
    if (roots.get(node.id)) found = Math.min(found, (width - gaps.get(node.id)) / roots.get(node.id));
  }
  return Number.isFinite(found) ? Math.max(0.1, found) : 1;
}
