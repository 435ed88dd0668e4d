// Reads the block that rl_app_ppo/report/packing.py writes.

type Place = [dtype: string, at: number, size: number];
export type Numbers = Int8Array | Uint8Array | Int16Array | Int32Array | Float32Array | Float64Array;
const KINDS = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const ABSENT = -32768;
const SCALE = 1000;
export const TOKEN_COLUMNS = ["advantages", "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy"] as const;
export type TokenColumn = (typeof TOKEN_COLUMNS)[number];

export interface Trajectory {
  index: number; step: number; key: string; uid: string; why: string; prompt: string; promptTokens: number;
  response: string; source: string; truth: string; finish: string; turns: number; toolCalls: number;
  reward: Record<string, number>; texts: Record<string, string>; failure: string; versions: [number, number][];
  length: number; score: number; advantage: number; gap: number;
}

export interface Span { worker: number; stage: number; began: number; ended: number }

export class Run {
  readonly steps: Int32Array;
  readonly metricNames: string[];
  readonly trajectories: Trajectory[] = [];
  readonly byStep = new Map<number, Trajectory[]>();
  readonly byKey = new Map<string, Trajectory>();
  readonly spans: Span[] = [];
  readonly syncs: [began: number, ended: number, version: number, bytes: number, receivers: number][];
  readonly ends: { step: number; at: number }[];
  private offsets: Int32Array;
  private masks: Numbers;
  private columns: Partial<Record<TokenColumn, Int16Array>> = {};

  constructor(readonly header: any, private read: (place: Place) => Numbers) {
    this.syncs = header.syncs;
    this.steps = read(header.metrics.step) as Int32Array;
    this.metricNames = Object.keys(header.metrics.columns);
    const t = header.trajectories;
    const lengths = read(t.length);
    this.offsets = new Int32Array(t.count + 1);
    for (let i = 0; i < t.count; i++) this.offsets[i + 1] = this.offsets[i]! + lengths[i]!;
    this.masks = read(t.mask);
    for (const name of TOKEN_COLUMNS) if (t.columns[name]) this.columns[name] = read(t.columns[name]) as Int16Array;
    this.readTrajectories(t, lengths);
    const s = header.spans;
    const [worker, stage, began, ended] = [s.worker, s.stage, s.began, s.ended].map((place: Place) => read(place));
    for (let i = 0; i < worker!.length; i++)
      this.spans.push({ worker: worker![i]!, stage: stage![i]!, began: began![i]!, ended: ended![i]! });
    const [step, at] = [read(header.ends.step), read(header.ends.at)];
    this.ends = Array.from(step, (number, i) => ({ step: number, at: at[i]! }));
  }

  get name(): string { return this.header.name; }

  metric(name: string): Float32Array | null {
    const place = this.header.metrics.columns[name];
    return place ? (this.read(place) as Float32Array) : null;
  }

  /** The values of a metric that are there, as [step, value]. */
  points(name: string): [number, number][] {
    const column = this.metric(name);
    return column ? Array.from(column, (v, i): [number, number] => [this.steps[i]!, v]).filter(([, v]) => !Number.isNaN(v)) : [];
  }

  last(name: string): number { return this.points(name).at(-1)?.[1] ?? NaN; }

  first(name: string): number { return this.points(name)[0]?.[1] ?? NaN; }

  has(name: TokenColumn, row: Trajectory): boolean {
    const column = this.columns[name];
    return Boolean(column && row.length && column[this.offsets[row.index]!] !== ABSENT);
  }

  /** A column of a trajectory; NaN for tokens that the policy did not generate, and for numbers that are not finite. */
  values(name: TokenColumn, row: Trajectory): Float32Array | null {
    if (!this.has(name, row)) return null;
    const mask = this.mask(row);
    return Float32Array.from(this.columns[name]!.subarray(this.offsets[row.index]!, this.offsets[row.index + 1]!), (v, i) => (mask[i] && v !== ABSENT ? v / SCALE : NaN));
  }

  gaps(row: Trajectory): Float32Array | null {
    const [rollout, trainer] = [this.values("rollout_log_probs", row), this.values("old_log_probs", row)];
    return rollout && trainer ? rollout.map((value, i) => trainer[i]! - value) : null;
  }

  mask(row: Trajectory): Numbers {
    return this.masks.subarray(this.offsets[row.index]!, this.offsets[row.index + 1]!);
  }

  tokens(row: Trajectory): { text: string; id: number }[] {
    const t = this.header.trajectories;
    const ids = this.read(t.ids);
    const own = this.read(t.tokens).subarray(this.offsets[row.index]!, this.offsets[row.index + 1]!);
    return Array.from(own, (i) => ({ text: t.vocabulary[i], id: ids[i]! }));
  }

  version(row: Trajectory): Int32Array {
    const found = new Int32Array(row.length);
    let at = 0;
    for (const [version, count] of row.versions) { found.fill(version, at, at + count); at += count; }
    return found;
  }

  private readTrajectories(t: any, lengths: Numbers): void {
    const [step, prompt, promptTokens, turns, toolCalls] =
      [t.step, t.prompt, t.prompt_tokens, t.turns, t.tool_calls].map((place: Place) => this.read(place));
    for (let i = 0; i < t.count; i++) {
      const key: string = t.key[i];
      const row: Trajectory = {
        index: i, step: step![i]!, key, uid: key.slice(0, key.lastIndexOf("/", key.lastIndexOf("/") - 1)), why: t.why[i],
        prompt: t.prompts[prompt![i]!], promptTokens: promptTokens![i]!, response: t.response[i], source: t.source[i],
        truth: t.truth[i], finish: t.finish[i], turns: turns![i]!, toolCalls: toolCalls![i]!, reward: t.reward[i],
        texts: t.texts[i], failure: t.failure[i], versions: t.versions[i], length: lengths[i]!,
        score: t.reward[i].score ?? NaN, advantage: NaN, gap: NaN,
      };
      const a = this.offsets[i]!, b = this.offsets[i + 1]!;
      row.advantage = this.average("advantages", a, b);
      row.gap = this.largestGap(a, b);
      this.trajectories.push(row);
      this.byKey.set(`${row.step}:${key}`, row);
      const rows = this.byStep.get(row.step);
      if (rows) rows.push(row); else this.byStep.set(row.step, [row]);
    }
  }

  private average(name: TokenColumn, a: number, b: number): number {
    const column = this.columns[name];
    if (!column || a === b || column[a] === ABSENT) return NaN;
    let sum = 0, count = 0;
    for (let i = a; i < b; i++) if (this.masks[i] && column[i] !== ABSENT) { sum += column[i]!; count++; }
    return sum / SCALE / count;
  }

  private largestGap(a: number, b: number): number {
    const [rollout, trainer] = [this.columns.rollout_log_probs, this.columns.old_log_probs];
    if (!rollout || !trainer || a === b || trainer[a] === ABSENT) return NaN;
    let most = 0;
    for (let i = a; i < b; i++) if (this.masks[i] && rollout[i] !== ABSENT && trainer[i] !== ABSENT) most = Math.max(most, Math.abs(rollout[i]! - trainer[i]!));
    return most / SCALE;
  }
}

export async function readRuns(element: HTMLElement): Promise<Run[]> {
  const packed = Uint8Array.from(atob(element.textContent ?? ""), (char) => char.charCodeAt(0));
  element.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const base = Math.ceil((4 + size) / 8) * 8;
  const read = ([dtype, at, count]: Place): Numbers => new KINDS[dtype as keyof typeof KINDS](buffer, base + at, count);
  return header.runs.map((run: any) => new Run(run, read));
}
