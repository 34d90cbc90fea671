// Launches an exported WGSL kernel by its manifest, on any GPUDevice: a browser's, Deno's, or that of npm's `webgpu`.

/** The buffers `plan` and `tables`: a header of where parts begin and of values, then the parts, by the manifest. */
export function pack(kernel, parts, values) {
  const { plan, tables } = kernel.packed;
  const begins = {};
  for (const [buffer, own] of [[plan, values], [tables, values]]) {
    let end = buffer.header.length;
    for (const { name } of buffer.parts) {
      begins[name] = end;
      end += (parts[name] ?? []).length;
    }
    buffer.size = end;
  }
  const write = (buffer, array) => {
    array.set(buffer.header.map(({ name }) => begins[name] ?? required(values, name)));
    for (const { name } of buffer.parts) array.set(parts[name] ?? [], begins[name]);
    return array;
  };
  return { plan: write(plan, new Int32Array(plan.size)), tables: write(tables, new Float32Array(tables.size)) };
}

export class Kernel {
  /** `read(file)` gives the text of a file of the export. */
  static async load(device, read, name = "attention") {
    const manifest = JSON.parse(await read("manifest.json"));
    if (manifest.format !== 1 || manifest.target.kind !== "webgpu")
      throw new Error(`manifest: expected format 1 for webgpu, got ${manifest.format} for ${manifest.target.kind}`);
    const kernel = new Kernel(device, manifest.kernels.find((entry) => entry.name === name));
    for (const [key, f] of Object.entries(kernel.entry.functions))
      kernel.pipelines[key] = await kernel.#pipeline(f, await read(f.source));
    return kernel;
  }

  constructor(device, entry) {
    this.device = device;
    this.entry = entry;
    this.pipelines = {};
  }

  async #pipeline({ entry, arguments: args }, code) {
    const buffers = args.filter(({ kind }) => kind === "buffer");
    const types = buffers.map(({ access }) => (access === "read" ? "read-only-storage" : "storage"));
    const entries = [...types, "uniform"].map((type, binding) => ({
      binding, visibility: GPUShaderStage.COMPUTE, buffer: { type },
    }));
    const layout = this.device.createPipelineLayout({ bindGroupLayouts: [this.device.createBindGroupLayout({ entries })] });
    const module = this.device.createShaderModule({ code });
    return this.device.createComputePipelineAsync({ layout, compute: { module, entryPoint: entry } });
  }

  buffer(content, usage = GPUBufferUsage.STORAGE) {
    const size = Math.max(4, content.byteLength);
    const made = this.device.createBuffer({ size, usage: usage | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST });
    this.device.queue.writeBuffer(made, 0, content);
    return made;
  }

  /** Runs attention, then merging where keys were split. `buffers` and `scalars` by name of argument. */
  run(buffers, scalars, numItems, numMerges = 0) {
    const encoder = this.device.createCommandEncoder();
    for (const [key, blocks] of [["attention", numItems], ["merge", numMerges]])
      if (blocks > 0) this.#encode(encoder, key, blocks, buffers, scalars);
    this.device.queue.submit([encoder.finish()]);
  }

  #encode(encoder, key, numBlocks, buffers, scalars) {
    const args = this.entry.functions[key].arguments, pipeline = this.pipelines[key];
    const own = { ...scalars, num_blocks: numBlocks };
    const values = args.filter(({ kind }) => kind === "scalar").map(({ name }) => required(own, name));
    const uniform = this.buffer(new Int32Array([...values, numBlocks - 1]), GPUBufferUsage.UNIFORM);
    const bound = args.filter(({ kind }) => kind === "buffer").map(({ name }) => required(buffers, name));
    const entries = [...bound, uniform].map((buffer, binding) => ({ binding, resource: { buffer } }));
    const group = this.device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries });
    const folds = Math.ceil(numBlocks / 65535);
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(Math.ceil(numBlocks / folds), 1, folds);
    pass.end();
  }

  async read(buffer) {
    const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
    const copy = this.device.createBuffer({ size: buffer.size, usage });
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, copy, 0, buffer.size);
    this.device.queue.submit([encoder.finish()]);
    await copy.mapAsync(GPUMapMode.READ);
    return new Float32Array(copy.getMappedRange().slice(0));
  }
}

function required(values, name) {
  if (!(name in values)) throw new Error(`${name}: expected a value, got none`);
  return values[name];
}
