// What two short texts have in common, word by word.

const MOST = 600;

// Each text as pieces {text, differs}, in order.
export function compared(before, after) {
  const [a, b] = [words(before), words(after)];
  if (a.length > MOST || b.length > MOST) return [[{ text: before, differs: true }], [{ text: after, differs: true }]];
  const common = lengths(a, b);
  const found = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      add(found[0], a[i++], false);
      add(found[1], b[j++], false);
    } else if (common[i + 1][j] >= common[i][j + 1]) add(found[0], a[i++], true);
    else add(found[1], b[j++], true);
  }
  for (; i < a.length; i++) add(found[0], a[i], true);
  for (; j < b.length; j++) add(found[1], b[j], true);
  found.forEach(unmarkEnd);
  return found;
}

// Both texts were cut somewhere behind. Where something differs before, the cut is no difference.
function unmarkEnd(pieces) {
  const last = pieces.at(-1);
  if (last?.differs && pieces.slice(0, -1).some((one) => one.differs)) last.differs = false;
}

const words = (text) => text.match(/\w+|\s+|[^\w\s]/g) ?? [];

function add(pieces, text, differs) {
  if (pieces.at(-1)?.differs === differs) pieces.at(-1).text += text;
  else pieces.push({ text, differs });
}

// common[i][j]: how many words a from i on and b from j on have in common, in order.
function lengths(a, b) {
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  return common;
}
