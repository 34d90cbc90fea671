/* A draft tree of six tokens over a paged cache, attended to by an exported kernel, and checked by the definition.

   usage: main [FILE]   writes out, then lse, as float32 to FILE

   One sequence. docs/export.md says how the arrays of a plan are computed in general. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "treeattn.h"

enum {
  NODES = 6,
  PREFIX = 41,
  KV_LEN = PREFIX + NODES,
  KV_HEADS = 2,
  GROUP = 3,
  Q_HEADS = KV_HEADS * GROUP,
  D = 32,
  PAGE_SIZE = 16,
  POOL = 5,
  WINDOW = 20,
  THREADS = 2,
  SPARE = 8,
  ROWS = NODES * GROUP,
  TILE = TREEATTN_ATTENTION_ROWS,
  TILES = (ROWS + TILE - 1) / TILE,
  ITEMS = TILES * KV_HEADS,
  STRIDE = NODES + SPARE
};

static const int parents[NODES] = {-1, 0, 0, 1, 1, 2};
static const int32_t page_ids[] = {3, 0, 4};
static float q[NODES][Q_HEADS][D], pages[POOL][2][KV_HEADS][PAGE_SIZE][D];
static float out[NODES][Q_HEADS][D], lse[NODES][Q_HEADS];

/* The plan. */
static int32_t nodes[NODES][3], bounds[TREEATTN_ATTENTION_NUM_LEAVES][STRIDE];
static int32_t spans[2][3], seqs[1][8], items[ITEMS][7], item_indptr[THREADS + 1];

static void fill(float *values, uint32_t count, uint32_t seed) {
  for (uint32_t i = 0; i < count; ++i) values[i] = (float)((i + seed) * 2654435761u >> 16) / 32768.0f - 1.0f;
}

/* (enter, exit, depth) of each node; here parents come before their children. */
static void lay_out_tree(void) {
  int size[NODES], next = 0, inside[NODES];
  for (int i = 0; i < NODES; ++i) size[i] = 1;
  for (int i = NODES - 1; i >= 0; --i)
    if (parents[i] >= 0) size[parents[i]] += size[i];
  for (int i = 0; i < NODES; ++i) {
    int *place = parents[i] < 0 ? &next : &inside[parents[i]];
    nodes[i][0] = *place;
    nodes[i][1] = *place + size[i];
    nodes[i][2] = parents[i] < 0 ? 0 : nodes[parents[i]][2] + 1;
    *place += size[i];
    inside[i] = nodes[i][0] + 1;
  }
}

/* Of the row tiles, the kinds for few rows come first. */
static int32_t kind_of(int rows) {
  static const int few[] = {TREEATTN_ATTENTION_FEW};
  int kind = 0;
  while (kind < TREEATTN_ATTENTION_NUM_FEW && few[kind] < rows) ++kind;
  return kind;
}

static void make_plan(void) {
  lay_out_tree();
  for (int i = 0; i < NODES; ++i) {
    bounds[0][i] = nodes[i][0];                       /* tree: enter */
    bounds[1][i] = PREFIX + nodes[i][2] - WINDOW + 1; /* window: position - window + 1 */
  }
  seqs[0][2] = PREFIX; /* q_begin, page_begin and node_begin are 0 */
  spans[0][1] = KV_LEN; /* one span of all columns, each of them tested */
  for (int i = 0; i < ITEMS; ++i) {
    int begin = i % TILES * TILE, rows = ROWS - begin < TILE ? ROWS - begin : TILE;
    int32_t item[7] = {kind_of(rows), 0, i / TILES, begin, rows, 0, 1};
    for (int field = 0; field < 7; ++field) items[i][field] = item[field];
  }
  for (int t = 0; t <= THREADS; ++t) item_indptr[t] = t * ITEMS / THREADS;
}

/* Threads for the kernel. */
typedef struct {
  treeattn_task task;
  void *data;
  int index, status;
} job;

static void *work(void *argument) {
  job *mine = argument;
  treeattn_group group = {NULL, THREADS};
  mine->status = mine->task(mine->index, &group, mine->data);
  return NULL;
}

static int run_on_threads(treeattn_task task, void *data, int num_tasks) {
  pthread_t threads[THREADS];
  job jobs[THREADS];
  int status = 0;
  (void)num_tasks; /* 0: as many as we like */
  for (int t = 0; t < THREADS; ++t) {
    jobs[t] = (job){task, data, t, -1};
    if (pthread_create(&threads[t], NULL, work, &jobs[t])) exit(3);
  }
  for (int t = 0; t < THREADS; ++t) {
    pthread_join(threads[t], NULL);
    status |= jobs[t].status;
  }
  return status;
}

static int run(void) {
  size_t bytes = (size_t)THREADS * TREEATTN_ATTENTION_WORKSPACE_FLOATS * sizeof(float);
  float *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  int32_t row_bounds[THREADS * TREEATTN_ATTENTION_NUM_LEAVES * (TILE > 8 ? TILE : 8)];
  if (!workspace) return -1;
  treeattn_arguments arguments = {
      .q = &q[0][0][0], .k = &pages[0][0][0][0][0], .v = &pages[0][1][0][0][0], .out = &out[0][0][0], .lse = &lse[0][0],
      .items = items[0], .item_indptr = item_indptr, .seqs = seqs[0], .spans = spans[0], .page_ids = page_ids,
      .bounds = bounds[0], .nodes = nodes[0], .workspace = workspace, .row_bounds = row_bounds,
      .threads = THREADS, .group = GROUP, .page_size = PAGE_SIZE, .bounds_stride = STRIDE,
      .sm_scale = 1 / sqrtf(D), .cap_limit = 1, .cap_inverse = 1,
      .q_token = Q_HEADS * D, .q_head = D, .out_token = Q_HEADS * D, .out_head = D, .lse_token = Q_HEADS,
      .k_page = 2 * KV_HEADS * PAGE_SIZE * D, .k_slot = D, .k_head = PAGE_SIZE * D,
      .v_page = 2 * KV_HEADS * PAGE_SIZE * D, .v_slot = D, .v_head = PAGE_SIZE * D,
  };
  treeattn_set_launch(run_on_threads);
  int status = treeattn_attention(&arguments);
  free(workspace);
  return status;
}

static int is_visible(int node, int column) {
  int depth = column < PREFIX ? 0 : nodes[column - PREFIX][2];
  int position = column < PREFIX ? column : PREFIX + depth, seen = column < PREFIX;
  for (int above = node; above >= 0 && !seen; above = parents[above]) seen = above == column - PREFIX;
  return seen && position > PREFIX + nodes[node][2] - WINDOW;
}

static const float *slot(int column, int is_value, int head) {
  return pages[page_ids[column / PAGE_SIZE]][is_value][head][column % PAGE_SIZE];
}

/* Largest difference from the definition, in double precision. */
static double difference(void) {
  double worst = 0;
  for (int node = 0; node < NODES; ++node)
    for (int head = 0; head < Q_HEADS; ++head) {
      double weights[KV_LEN] = {0}, total = 0;
      for (int column = 0; column < KV_LEN; ++column) {
        double score = 0;
        if (!is_visible(node, column)) continue;
        for (int d = 0; d < D; ++d) score += (double)q[node][head][d] * slot(column, 0, head / GROUP)[d];
        total += weights[column] = exp(score / sqrt(D));
      }
      worst = fmax(worst, fabs(log2(total) - lse[node][head]));
      for (int d = 0; d < D; ++d) {
        double sum = 0;
        for (int column = 0; column < KV_LEN; ++column) sum += weights[column] * slot(column, 1, head / GROUP)[d];
        worst = fmax(worst, fabs(sum / total - out[node][head][d]));
      }
    }
  return worst;
}

int main(int argc, char **argv) {
  fill(&q[0][0][0], sizeof q / sizeof(float), 1);
  fill(&pages[0][0][0][0][0], sizeof pages / sizeof(float), 100003);
  make_plan();
  if (run()) return 1;
  double worst = difference();
  printf("%d tokens, %d keys: largest difference from the definition %.1e\n", NODES, KV_LEN, worst);
  if (argc > 1) {
    FILE *file = fopen(argv[1], "wb");
    if (!file || fwrite(out, sizeof out, 1, file) != 1 || fwrite(lse, sizeof lse, 1, file) != 1) return 1;
    if (fclose(file)) return 1;
  }
  return worst < 1e-5 ? 0 : 1;
}
