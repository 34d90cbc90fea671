// A draft tree of six tokens over a paged cache, attended to by an exported WGSL kernel, checked by the definition.
//
//   treeattn compile --target webgpu --spec spec.json -o export
//   npm install
//   node main.mjs          or          npx deno run --allow-read --allow-write --unstable-webgpu main.mjs
//
// Arguments: a folder with the export, "export" by default, and a file to write out, then lse, to as float32.
// `--pack` as a third argument writes the buffers `plan` and `tables` instead, and needs no GPU.
// One sequence. docs/export.md says how the arrays of a plan are computed in general.
import { readFile, writeFile } from "node:fs/promises";
import process from "node:process";

import { Kernel, pack } from "./attention.mjs";

const parents = [-1, 0, 0, 1, 1, 2];
const pageIds = [3, 0, 4];
const n = parents.length, prefix = 41, kvLen = prefix + n, kvHeads = 2, group = 3, qHeads = kvHeads * group;
const d = 32, pageSize = 16, pool = 5, window = 20, pageStride = 2 * kvHeads * pageSize * d;

const fill = (count, seed) =>
  Float32Array.from({ length: count }, (_, i) => (Math.imul(i + seed, 2654435761) >>> 16) / 32768 - 1);
const q = fill(n * qHeads * d, 1), pages = fill(pool * pageStride, 100003);

/** [enter, exit, depth] of each node; here parents come before their children. */
function layOut() {
  const size = parents.map(() => 1), inside = [], nodes = [];
  for (let i = n - 1; i >= 0; --i) if (parents[i] >= 0) size[parents[i]] += size[i];
  let next = 0;
  parents.forEach((parent, i) => {
    const enter = parent < 0 ? next : inside[parent];
    if (parent < 0) next += size[i];
    else inside[parent] += size[i];
    inside[i] = enter + 1;
    nodes.push([enter, enter + size[i], parent < 0 ? 0 : nodes[parent][2] + 1]);
  });
  return nodes;
}

const nodes = layOut();

/** The parts of the plan, flat. The two last blocks of columns are split from the others to show merging. */
function plan({ tile }) {
  const rows = n * group, items = [], merges = [];
  const cut = tile.columns;
  for (let head = 0; head < kvHeads; ++head)
    for (let begin = 0; begin < rows; begin += tile.rows) {
      const first = items.length, of = [0, head, begin, Math.min(tile.rows, rows - begin)];
      items.push([first, ...of, 0, 1], [first + 1, ...of, 1, 2]);
      merges.push([first, ...of, first, first + 2]);
    }
  return {
    items, merges,
    seqs: [[0, 0, prefix, 0, 0, 0, 0, 0]],
    spans: [[0, cut, 0], [cut, kvLen, 0], [0, 0, 0]],
    page_ids: pageIds,
    bounds: [nodes.map(([enter]) => enter), nodes.map(([, , depth]) => prefix + depth - window + 1)],
    nodes,
  };
}

async function attend(device, kernel, parts, packed) {
  const { items, merges } = parts, { tile } = kernel.entry;
  const floats = (count) => kernel.buffer(new Float32Array(count));
  const buffers = {
    q: kernel.buffer(q), k: kernel.buffer(pages), out: floats(n * qHeads * d), lse: floats(n * qHeads),
    partial: floats(items.length * tile.rows * (d + 2)), plan: kernel.buffer(packed.plan), tables: kernel.buffer(packed.tables),
  };
  buffers.v = buffers.k;
  kernel.run(buffers, {
    q_at: 0, q_token: qHeads * d, q_head: d, out_at: 0, out_token: qHeads * d, out_head: d,
    k_at: 0, k_page: pageStride, k_slot: d, k_head: pageSize * d,
    v_at: kvHeads * pageSize * d, v_page: pageStride, v_slot: d, v_head: pageSize * d,
  }, items.length, merges.length);
  return { out: await kernel.read(buffers.out), lse: await kernel.read(buffers.lse) };
}

function isVisible(node, column) {
  const before = column < prefix, position = before ? column : prefix + nodes[column - prefix][2];
  let seen = before;
  for (let above = node; above >= 0 && !seen; above = parents[above]) seen = above === column - prefix;
  return seen && position > prefix + nodes[node][2] - window;
}

/** Largest difference from the definition, in double precision. */
function difference({ out, lse }) {
  const at = (isValue, head, column) =>
    pageIds[Math.floor(column / pageSize)] * pageStride + ((isValue * kvHeads + head) * pageSize + column % pageSize) * d;
  let worst = 0;
  for (let node = 0; node < n; ++node)
    for (let head = 0; head < qHeads; ++head) {
      const row = (node * qHeads + head) * d, kvHead = Math.floor(head / group), sums = new Array(d).fill(0);
      let total = 0;
      for (let column = 0; column < kvLen; ++column) {
        if (!isVisible(node, column)) continue;
        const key = at(0, kvHead, column), value = at(1, kvHead, column);
        let score = 0;
        for (let i = 0; i < d; ++i) score += q[row + i] * pages[key + i];
        const weight = Math.exp(score / Math.sqrt(d));
        total += weight;
        for (let i = 0; i < d; ++i) sums[i] += weight * pages[value + i];
      }
      const differences = sums.map((sum, i) => Math.abs(sum / total - out[row + i]));
      worst = Math.max(worst, Math.abs(Math.log2(total) - lse[node * qHeads + head]), ...differences);
    }
  return worst;
}

/** WebGPU of the browser or Deno, or else of npm's `webgpu`, if there is any. */
async function findGpu() {
  if (globalThis.navigator?.gpu) return navigator.gpu;
  const { create, globals } = await import("webgpu").catch(() => ({}));
  Object.assign(globalThis, globals);
  return create?.([]);
}

const [folder = "export", file, mode] = process.argv.slice(2);
const read = (name) => readFile(`${folder}/${name}`, "utf8");
const entry = JSON.parse(await read("manifest.json")).kernels[0];
const parts = plan(entry);
const flat = Object.fromEntries(Object.entries(parts).map(([name, part]) => [name, part.flat()]));
const packed = pack(entry, flat, {
  bounds_stride: n, page_size: pageSize, group, q_heads: qHeads,
  sm_scale: 1 / Math.sqrt(d), cap_limit: 1, cap_inverse: 1, minus_infinity: -Infinity,
});
if (mode === "--pack") {
  await writeFile(file, new Uint8Array([...new Uint8Array(packed.plan.buffer), ...new Uint8Array(packed.tables.buffer)]));
  process.exit(0);
}
const gpu = await findGpu(); // npm's is gone, with all it made, once nothing refers to it
const adapter = await gpu?.requestAdapter();
if (!adapter) {
  console.error("no WebGPU adapter: needs Deno or npm's webgpu, and a Vulkan driver (for the CPU: mesa-vulkan-drivers)");
  process.exit(3);
}
const device = await adapter.requestDevice();
const result = await attend(device, await Kernel.load(device, read), parts, packed);
const worst = difference(result);
console.log(`${n} tokens, ${kvLen} keys: largest difference from the definition ${worst.toExponential(1)}`);
if (file) await writeFile(file, new Uint8Array([result.out, result.lse].flatMap((x) => [...new Uint8Array(x.buffer)])));
device.destroy();
process.exitCode = worst < 1e-5 ? 0 : 1;
