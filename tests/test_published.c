/*
 * Frozen weights kept in the codes that a folder has them in: the bits of training from their numbers, in every placement and at any number of ranks, in
 * as many bytes as the codes and their scales have; and what cannot be kept so.
 */
#include "lib_folder.h"
#include "lib_rig.h"
#include "quant.h"
#include "spw_access.h"
#include "spw_generate.h"
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- a folder of 8-bit floats */

/* A Llama of two layers, whose matrices have a scale for each block of 64 x 128; rows of 288 are groups of 32, and the last block has less. */
static char floats[256]; /* its path */
static const char *const llama_config =
    "{\"model_type\": \"llama\", \"hidden_size\": 128, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "
    "\"vocab_size\": 41, \"max_position_embeddings\": 64, \"intermediate_size\": 288, \"num_hidden_layers\": 2, "
    "\"tie_word_embeddings\": true, \"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", "
    "\"activation_scheme\": \"dynamic\", \"weight_block_size\": [64, 128]}}";

static uint32_t
draw(uint64_t at)
{
    uint32_t r[4];
    spw_philox(17, 1, at, r);
    return r[0];
}

static void
add_numbers(folder *f, const char *name, uint64_t rows, uint64_t cols)
{
    const uint64_t shape[2] = {rows > 1 ? rows : cols, cols};
    uint16_t *to = folder_add(f, name, "BF16", rows > 1 ? 2 : 1, shape, 2 * rows * cols)->data;
    for (uint64_t i = 0; i < rows * cols; i++)
        to[i] = spw_f32_to_bf16(rows == 1 ? 1.0f : (float)((int32_t)draw(i) >> 8) * 0x1p-27f);
}

/* Some codes are subnormal, and no block has all its greatest. */
static void
add_codes(folder *f, const char *name, uint64_t rows, uint64_t cols)
{
    const uint64_t shape[2] = {rows, cols}, blocks[2] = {(rows + 63) / 64, (cols + 127) / 128};
    char scale[SPW_TENSOR_NAME_BYTES];
    uint8_t *to = folder_add(f, name, "F8_E4M3", 2, shape, rows * cols)->data;
    float *scales;
    for (uint64_t i = 0; i < rows * cols; i++)
        to[i] = (uint8_t)((draw(i + 7) & 0x80u) | draw(i) % (40 + draw(i / cols) % 87));
    snprintf(scale, sizeof scale, "%s_scale_inv", name);
    scales = folder_add(f, scale, "F32", 2, blocks, 4 * blocks[0] * blocks[1])->data;
    for (uint64_t i = 0; i < blocks[0] * blocks[1]; i++)
        scales[i] = 2e-4f + (float)(draw(i + 3) >> 8) * 0x1p-38f;
}

/* Integers of 8 bits, four to a word, with a scale for each 64. Numbers of 16 bits do not tell the greatest from each other. */
static char whole[256];
static const char *const whole_config = "{\"quant_method\": \"compressed-tensors\", \"format\": \"pack-quantized\", "
                                        "\"config_groups\": {\"group_0\": {\"targets\": "
                                        "[\"Linear\"], \"weights\": {\"num_bits\": 8, \"type\": \"int\", "
                                        "\"symmetric\": true, \"dynamic\": false, \"strategy\": "
                                        "\"group\", \"group_size\": 64}}}}}";

static void
add_integers(folder *f, const char *name, uint64_t rows, uint64_t cols)
{
    const uint64_t shape[2] = {rows, cols / 4}, groups[2] = {rows, (cols + 63) / 64};
    char other[SPW_TENSOR_NAME_BYTES + 8];
    uint16_t *scales;
    uint8_t *to;
    snprintf(other, sizeof other, "%s_packed", name);
    to = folder_add(f, other, "I32", 2, shape, rows * cols)->data;
    for (uint64_t i = 0; i < rows * cols; i++)
        to[i] = (uint8_t)draw(i + 5);
    snprintf(other, sizeof other, "%s_scale", name);
    scales = folder_add(f, other, "BF16", 2, groups, 2 * rows * groups[1])->data;
    for (uint64_t i = 0; i < rows * groups[1]; i++)
        scales[i] = spw_f32_to_bf16(1e-4f + (float)(draw(i + 9) >> 8) * 0x1p-37f);
}

/* What a matrix has instead, somewhere: of its codes, or its scales. */
#define DAMAGED "model.layers.1.mlp.up_proj.weight"
typedef struct damage {
    const char *more; /* of the tensor's name */
    uint32_t is, bytes;
} damage;

static void
make_folder(char path[256], bool integers, const damage *d)
{
    static const struct {
        const char *name;
        uint64_t rows, cols;
    } matrices[] = {{"self_attn.q_proj", 128, 128}, {"self_attn.k_proj", 64, 128}, {"self_attn.v_proj", 64, 128},
                    {"self_attn.o_proj", 128, 128}, {"mlp.gate_proj", 288, 128},   {"mlp.up_proj", 288, 128},
                    {"mlp.down_proj", 128, 288}};
    folder *f = folder_make();
    char name[SPW_TENSOR_NAME_BYTES];
    snprintf(f->config, sizeof f->config, "%s", llama_config);
    if (integers)
        folder_replace(f, strstr(llama_config, "{\"quant_method"), whole_config);
    add_numbers(f, "model.embed_tokens.weight", 41, 128);
    add_numbers(f, "model.norm.weight", 1, 128);
    for (int l = 0; l < 2; l++) {
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", l);
        add_numbers(f, name, 1, 128);
        snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", l);
        add_numbers(f, name, 1, 128);
        for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, matrices[i].name);
            (integers ? add_integers : add_codes)(f, name, matrices[i].rows, matrices[i].cols);
        }
    }
    if (d != NULL) {
        struct tensor *t;
        snprintf(name, sizeof name, DAMAGED "%s", d->more);
        t = folder_find(f, name);
        memcpy((char *)t->data + t->bytes / 8 * 4, &d->is, d->bytes);
    }
    folder_write(f);
    snprintf(path, 256, "%s", f->dir);
    f->dir[0] = '\0';
    for (uint32_t i = 0; i < f->count; i++)
        free(f->tensors[i].data);
    free(f);
}

static int
make_folders(void **state)
{
    (void)state;
    make_folder(floats, false, NULL);
    make_folder(whole, true, NULL);
    return 0;
}

static int
remove_folders(void **state)
{
    (void)state;
    tiny_dir_remove(floats);
    tiny_dir_remove(whole);
    return 0;
}

/* ---------------------------------------------------------------- the same bits */

static const char *const kimi = "tests/vectors/scaled/kimi_k25";

static void
from_folder(rig *r, const char *path)
{
    rig_need(r, spw_hf_config_load(&r->c.model, path, &r->err));
    snprintf(r->c.model_path, sizeof r->c.model_path, "%s", path);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "published");
    r->from = path;
}

static void
lora_everywhere(rig *r)
{
    rig_lora(r);
    r->c.run.lora_targets.count = 1;
    snprintf(r->c.run.lora_targets.item[0], sizeof r->c.run.lora_targets.item[0], "*_proj");
}

/* Experts of 4 bits, the rest is numbers. */
static void
kimi_lora(rig *r)
{
    lora_everywhere(r);
    from_folder(r, kimi);
}

static void
floats_lora(rig *r)
{
    rig_lora(r);
    from_folder(r, floats);
}

static void
integers_lora(rig *r)
{
    rig_lora(r);
    from_folder(r, whole);
}

/* A scale of 8 bits for 16 and one for a matrix are one of 32 bits for 16. */
static void
nvfp4_lora(rig *r)
{
    lora_everywhere(r);
    from_folder(r, "tests/vectors/scaled/llama_nvfp4");
}

static void
mxfp4_lora(rig *r)
{
    lora_everywhere(r);
    from_folder(r, "tests/vectors/scaled/llama_mxfp4");
}

/* Experts of 4 bits, the rest of 8. */
static void
experts_lora(rig *r)
{
    lora_everywhere(r);
    from_folder(r, "tests/vectors/scaled/qwen3_fp4");
}

/* A scale for 32 rows of a column. */
static void
strips_lora(rig *r)
{
    lora_everywhere(r);
    from_folder(r, "tests/vectors/families/gpt_oss_mxfp4");
}

static void
deepseek_lora(rig *r)
{
    lora_everywhere(r);
    from_folder(r, "tests/vectors/scaled/deepseek_v4");
}

/* All but norms and the embeddings is frozen. */
static void
floats_frozen(rig *r)
{
    rig_freeze(r, "*_proj.weight");
    from_folder(r, floats);
}

static bool
is_kept(const rig *r)
{
    const spw_layout *l = spw_engine_layout(r->e);
    bool any = false;
    for (uint32_t u = 0; u < l->unit_count; u++)
        any = any || spw_codes_group(l->units[u].form) > 0;
    return any;
}

/* Losses, norms and all state, frozen weights too, are those of the same run with numbers. */
static void
as_numbers(spw_state_format format, spw_tier tier, void (*change)(rig *r))
{
    rig kept, plain;
    rig_config(&kept, SPW_FAMILY_LLAMA, format, tier);
    rig_config(&plain, SPW_FAMILY_LLAMA, format, SPW_TIER_HOST);
    change(&kept);
    change(&plain);
    snprintf(plain.c.run.frozen_codes, sizeof plain.c.run.frozen_codes, "none");
    rig_open(&kept);
    rig_open(&plain);
    assert_true(is_kept(&kept) && !is_kept(&plain));
    rig_fill(&kept);
    rig_fill(&plain);
    rig_train(&kept, 0, RIG_STEPS);
    rig_train(&plain, 0, RIG_STEPS);
    assert_true(kept.losses[0] > 1 && kept.losses[0] < 10 && kept.losses[0] != kept.losses[RIG_STEPS - 1]);
    assert_memory_equal(kept.losses, plain.losses, sizeof kept.losses);
    assert_memory_equal(kept.norms, plain.norms, sizeof kept.norms);
    rig_same_state(&kept, &plain, "state beside published codes");
    rig_remove(&kept);
    rig_remove(&plain);
}

static void
test_as_numbers(void **state)
{
    (void)state;
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_NVME, kimi_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_HOST, kimi_lora);
    as_numbers(SPW_STATE_MIXED, SPW_TIER_DEVICE, kimi_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_HOST, floats_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_HOST, integers_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_NVME, integers_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_NVME, nvfp4_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_HOST, nvfp4_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_NVME, mxfp4_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_HOST, mxfp4_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_NVME, experts_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_HOST, experts_lora);
    as_numbers(SPW_STATE_MIXED, SPW_TIER_DEVICE, experts_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_NVME, deepseek_lora);
    as_numbers(SPW_STATE_SPLIT, SPW_TIER_NVME, strips_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_HOST, strips_lora);
    as_numbers(SPW_STATE_MIXED, SPW_TIER_DEVICE, strips_lora);
    as_numbers(SPW_STATE_FP32, SPW_TIER_NVME, floats_frozen);
    as_numbers(SPW_STATE_MIXED, SPW_TIER_NVME, floats_frozen);
}

static void
test_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, kimi_lora);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0, floats_lora);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, experts_lora);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, strips_lora);
}

/* A checkpoint has the numbers, and the folder the codes. */
static void
test_resumes(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_NVME, kimi_lora);
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_LLAMA, SPW_TIER_HOST, floats_frozen);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_HOST, integers_lora);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_NVME, strips_lora);
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_LLAMA, SPW_TIER_HOST, strips_lora);
}

/* ---------------------------------------------------------------- bytes */

/* Matrices with such names are codes of so many bytes for 128 weights, in units of their own; block 0: there are none. */
typedef struct kept_kind {
    const char *name;
    uint64_t block;
} kept_kind;

/* Nothing else is coded. live: elements that the device has room for, so that some go and come back; 0: nothing is trained. */
static void
count(void (*change)(rig *r), kept_kind first, kept_kind second, uint64_t live)
{
    const kept_kind kinds[] = {first, second};
    rig r;
    spw_store_stats before, after;
    const spw_layout *l;
    uint64_t all = 0, coded = 0, want = 0;
    double each[3], moved, planned;
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    change(&r);
    r.c.zero.max_live_parameters = live > 0 ? live : r.c.zero.max_live_parameters;
    rig_open(&r);
    l = spw_engine_layout(r.e);
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        const spw_quant form = l->units[l->chunks[i].unit_idx].form;
        all += form != SPW_QUANT_NONE ? spw_round_up(l->chunks[i].elems / 128 * spw_codes_block_bytes(form), 4096)
                                      : l->chunks[i].elems * 2;
        coded += form != SPW_QUANT_NONE ? l->chunks[i].elems : 0;
    }
    for (uint32_t id = 0; id < r.model->param_count; id++) {
        const spw_param *p = &r.model->params[id];
        const spw_quant form = l->units[l->places[id].unit_idx].form;
        uint64_t block = 0;
        for (int k = 1; k >= 0; k--)
            block = kinds[k].block > 0 && strstr(p->name, kinds[k].name) != NULL && p->ndim == 2 && !p->adapter
                        ? kinds[k].block
                        : block;
        assert_int_equal(form != SPW_QUANT_NONE ? spw_codes_block_bytes(form) : 0, block);
        want += block > 0 ? spw_round_up(p->rows * p->cols, 128) : 0;
    }
    assert_true(want > 0 && coded >= want && coded < want + 32 * 4096); /* experts begin at multiples of 4096 */
    assert_int_equal(spw_engine_plan(r.e)->weight_host, all);
    if (live > 0) {
        rig_fill(&r);
        rig_train(&r, 0, 2);
        planned = (double)spw_engine_plan(r.e)->traffic[SPW_PACE_DEFAULT].h2d;
        for (int k = 0; k < 3; k++) { /* now and then a busy machine brings a unit once more, or a step earlier */
            rig_need(&r, spw_engine_drain(r.e, &r.err));
            spw_store_get_stats(spw_engine_store(r.e), &before);
            rig_train(&r, k + 2, k + 3);
            rig_need(&r, spw_engine_drain(r.e, &r.err));
            spw_store_get_stats(spw_engine_store(r.e), &after);
            each[k] = (double)(after.h2d_bytes - before.h2d_bytes);
        }
        moved = fmax(fmin(each[0], each[1]), fmin(fmax(each[0], each[1]), each[2])); /* the median */
        assert_true(moved > 0.95 * planned && moved < 1.05 * planned); /* numbers would be nearly twice as much */
    }
    rig_remove(&r);
}

static void
test_bytes(void **state)
{
    const kept_kind none = {"", 0};
    (void)state;
    count(kimi_lora, (kept_kind){".experts.", 64 + 8 * 2}, none, 0); /* a scale of 16 bits for each 16 */
    count(floats_lora, (kept_kind){"down_proj.weight", 128 + 4 * 4}, (kept_kind){"_proj.weight", 128 + 4}, 200000);
    count(integers_lora, (kept_kind){"down_proj.weight", 128 + 4 * 2}, (kept_kind){"_proj.weight", 128 + 2 * 2}, 0);
    count(nvfp4_lora, (kept_kind){"_proj.weight", 64 + 8 * 4}, none, 0);
    count(mxfp4_lora, (kept_kind){"_proj.weight", 64 + 4}, none, 0);
    count(experts_lora, (kept_kind){".experts.", 64 + 4}, (kept_kind){"_proj.weight", 128 + 8 * 4}, 0);
    count(experts_lora, (kept_kind){".experts.", 64 + 4}, (kept_kind){"_proj.weight", 128 + 8 * 4}, 30000);
    count(strips_lora, (kept_kind){".experts.", 64 + 4}, none, 0);
}

/* ---------------------------------------------------------------- what is not kept */

static void
refused(void (*change)(rig *r), spw_status want, const char *words)
{
    rig r;
    spw_status st;
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    change(&r);
    st = rig_begin(&r);
    if (st != want || strstr(r.err.message, words) == NULL)
        fail_msg("%d, %s: not \"%s\"", (int)st, r.err.message, words);
    rig_remove(&r);
}

static void
without_folder(rig *r)
{
    rig_lora(r);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "published");
}

/* Rows of 24 and 44 weights, and blocks of 16 x 10. */
static void
odd_blocks(rig *r)
{
    rig_lora(r);
    from_folder(r, "tests/vectors/scaled/llama");
}

static void
half_floats(rig *r)
{
    floats_lora(r);
    r->c.run.state_format = SPW_STATE_MIXED_F16;
}

static void
other_numbers(rig *r)
{
    kimi_lora(r);
    r->from = NULL;
}

static void
test_refused(void **state)
{
    (void)state;
    refused(without_folder, SPW_ECONFIG, "needs model.path");
    refused(odd_blocks, SPW_ECONFIG, "tests/vectors/scaled/llama has no matrices as codes that are kept");
    refused(half_floats, SPW_ECONFIG, "is for weights in bf16 or fp32");
    refused(other_numbers, SPW_EINVAL, "weights drawn at random are not those that tests/vectors/scaled/kimi_k25 has");
}

/* Numbers of another folder, of other codes or none, are compared with what is kept. */
static void
test_other_numbers(void **state)
{
    const uint64_t last = 288 * 128 - 1;
    const float other = 0.5f;
    char path[400];
    (void)state;
    for (int k = 0; k < 2; k++) {
        spw_stretch held;
        rig r, plain;
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
        floats_lora(&r);
        r.c.run.frozen_in_place = false;
        rig_open(&r);
        rig_need(&r, spw_engine_load_weights(r.e, floats, &r.err));
        if (k == 0) {
            assert_int_equal(spw_engine_load_weights(r.e, whole, &r.err), SPW_EINVAL);
        } else { /* a checkpoint whose last number of a matrix is another one */
            rig_config(&plain, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
            floats_lora(&plain);
            snprintf(plain.c.run.frozen_codes, sizeof plain.c.run.frozen_codes, "none");
            rig_open(&plain);
            rig_fill(&plain);
            rig_need(&plain, spw_access_set_local(plain.e, &(spw_access){DAMAGED, SPW_ACCESS_MASTER, last, 1}, &other,
                                                  &held, &plain.err));
            rig_save(&plain, 0);
            snprintf(path, sizeof path, "%s/step-0", plain.dir);
            assert_int_equal(spw_checkpoint_load(r.e, path, &r.err), SPW_EINVAL);
            rig_remove(&plain);
        }
        if (strstr(r.err.message, "these weights are not what the codes of ") == NULL)
            fail_msg("%s", r.err.message);
        rig_remove(&r);
    }
}

/* What is kept so is shown as numbers, and cannot be set; the run goes on. */
static void
test_not_set(void **state)
{
    static float values[1 << 16];
    uint32_t kept = 0;
    spw_access a;
    spw_stretch held;
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    floats_lora(&r);
    rig_open(&r);
    rig_fill(&r);
    for (uint32_t id = 0; id < r.model->param_count; id++) {
        const spw_param *p = &r.model->params[id];
        const bool is = strstr(p->name, "_proj.weight") != NULL && !p->adapter;
        memset(&r.err, 0, sizeof r.err);
        rig_need(&r, spw_access_find(&a, r.e, p->name, "master", &r.err));
        rig_need(&r, spw_access_get_local(r.e, &a, values, &held, &r.err));
        assert_int_equal(spw_access_set_local(r.e, &a, values, &held, &r.err), is ? SPW_EUNSUPPORTED : SPW_OK);
        assert_true(!is || strstr(r.err.message, "kept in the codes it was published in") != NULL);
        kept += is;
    }
    assert_int_equal(kept, 2 * 7);
    memset(&r.err, 0, sizeof r.err);
    rig_train(&r, 0, 1);
    rig_remove(&r);
}

/* ---------------------------------------------------------------- codes as they are read */

typedef struct bound {
    spw_model *model;
    spw_hf_reader *r;
    spw_bounce *bounce;
    spw_quant forms[256];
} bound;

static bound
open_codes(const char *path, spw_dtype dtype)
{
    bound b = {0};
    spw_error err = {0};
    spw_model_config m;
    spw_status st = spw_hf_config_load(&m, path, &err);
    st = st == SPW_OK ? spw_model_build(&b.model, &m, &err) : st;
    assert_true(st != SPW_OK || b.model->param_count <= 256);
    st = st == SPW_OK ? spw_hf_codes(b.forms, path, b.model, dtype, &err) : st;
    st = st == SPW_OK ? spw_hf_reader_open(&b.r, path, &err) : st;
    st = st == SPW_OK ? spw_hf_reader_bind(b.r, b.model, &err) : st;
    st = st == SPW_OK ? spw_bounce_create(&b.bounce, 1, &err) : st;
    if (st != SPW_OK)
        fail_msg("%s: %s", path, err.message);
    spw_hf_reader_past_cache(b.r, b.bounce);
    return b;
}

static void
close_codes(bound *b)
{
    spw_hf_reader_close(b->r);
    spw_bounce_destroy(b->bounce);
    spw_model_destroy(b->model);
}

/* All of a matrix decodes to the numbers that are read of it, and what is read of any part are the same blocks. */
static void
same_matrix(bound *b, uint32_t id, spw_dtype dtype)
{
    const spw_param *p = &b->model->params[id];
    const spw_quant form = b->forms[id];
    const uint64_t n = p->rows * p->cols, unit = spw_codes_unit(form), up = spw_round_up(n, unit),
                   bytes = spw__quant_bytes(form, unit);
    const uint32_t size = spw_dtype_bytes(dtype);
    uint8_t *all = malloc(up / unit * bytes), *part = malloc(up / unit * bytes + 1);
    float *numbers = calloc(up, 4), *want = calloc(up, 4), *got = calloc(up, 4);
    spw_error err = {0};
    memset(all, 0xee, up / unit * bytes);
    if (spw_hf_read_codes(b->r, id, form, 0, n, all, &err) != SPW_OK ||
        spw_hf_read_param(b->r, id, 0, n, numbers, &err) != SPW_OK)
        fail_msg("%s: %s", p->name, err.message);
    spw_state_set(dtype == SPW_F32 ? SPW_STATE_FP32 : SPW_STATE_SPLIT, NULL, want, NULL, up, SPW_PART_MASTER, 0, n,
                  numbers);
    spw__quant_decode(got, dtype, all, form, up);
    assert_memory_equal(got, want, up * size);
    for (uint64_t k = 0; k < 8; k++) {
        const uint64_t first = draw(k) % (up / unit), end = first + 1 + draw(k + 8) % (up / unit - first),
                       last = end * unit < n ? end * unit : n;
        part[(end - first) * bytes] = 0xee;
        assert_int_equal(spw_hf_read_codes(b->r, id, form, first * unit, last - first * unit, part, &err), SPW_OK);
        assert_memory_equal(part, all + first * bytes, (end - first) * bytes);
        assert_int_equal(part[(end - first) * bytes], 0xee);
    }
    free(all);
    free(part);
    free(numbers);
    free(want);
    free(got);
}

static void
test_read(void **state)
{
    const char *const paths[] = {kimi,
                                 floats,
                                 whole,
                                 "tests/vectors/scaled/llama_nvfp4",
                                 "tests/vectors/scaled/llama_modelopt",
                                 "tests/vectors/scaled/llama_mxfp4",
                                 "tests/vectors/scaled/qwen3_fp4",
                                 "tests/vectors/families/gpt_oss_mxfp4"};
    (void)state;
    for (size_t k = 0; k < 2 * sizeof paths / sizeof paths[0]; k++) {
        const spw_dtype dtype = k % 2 ? SPW_F32 : SPW_BF16;
        bound b = open_codes(paths[k / 2], dtype);
        uint32_t seen = 0;
        for (uint32_t id = 0; id < b.model->param_count; id++) {
            if (b.forms[id] != SPW_QUANT_NONE)
                same_matrix(&b, id, dtype);
            seen += b.forms[id] != SPW_QUANT_NONE;
        }
        assert_true(seen > 4);
        close_codes(&b);
    }
}

/* And of a column of gpt-oss' experts. */
static void
test_no_scale(void **state)
{
    static const char *const scales = "model.layers.0.mlp.experts.gate_up_proj_scales";
    const uint8_t nan = 0xff;
    char command[600], dir[256], file[300];
    spw_error err = {0};
    spw_st_reader *reader = NULL;
    spw_st_extent at;
    rig r;
    int fd;
    (void)state;
    tiny_dir_make(dir);
    snprintf(command, sizeof command, "cp tests/vectors/families/gpt_oss_mxfp4/* %s", dir);
    assert_int_equal(system(command), 0);
    snprintf(file, sizeof file, "%s/model.safetensors", dir);
    assert_int_equal(spw_st_reader_open(&reader, file, &err), SPW_OK);
    assert_true(spw_st_reader_extent(reader, spw_st_reader_find(reader, scales), &at));
    fd = open(file, O_RDWR);
    assert_true(fd >= 0 && pwrite(fd, &nan, 1, (off_t)at.offset + 100) == 1);
    close(fd);
    spw_st_reader_close(reader);
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    lora_everywhere(&r);
    from_folder(&r, dir);
    rig_open(&r);
    assert_int_equal(spw_engine_load_weights(r.e, dir, &r.err), SPW_ECORRUPT);
    if (strstr(r.err.message, "the scales of tensor model.layers.0.mlp.experts.gate_up_proj_blocks are no finite") ==
        NULL)
        fail_msg("%s", r.err.message);
    rig_remove(&r);
    tiny_dir_remove(dir);
}

/* Parameters, chunks and parts of what is kept in strips begin at whole strips; those that no chunk has room for are numbers. */
static void
whole_strips(const spw_model *m, const spw_layout *l, uint64_t chunk_elems)
{
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        const spw_store_chunk *c = &l->chunks[i];
        const uint64_t unit = spw_codes_unit(l->units[c->unit_idx].form);
        assert_true(c->first % unit == 0 && c->elems % unit == 0 && c->elems % 4096 == 0 && c->elems <= chunk_elems);
    }
    for (uint32_t id = 0; id < m->param_count; id++) {
        const spw_place *at = &l->places[id];
        const spw_quant form = l->units[at->unit_idx].form;
        const uint64_t step = m->params[id].cols == 160 ? 20480 : 12288; /* of 32 x 160 and 32 x 192, and 4096 */
        assert_true(
            spw_codes_cols(form) ==
            (m->params[id].stack > 0 && m->params[id].ndim == 2 && step <= chunk_elems ? m->params[id].cols : 0));
        assert_true(at->first % spw_codes_unit(form) == 0);
    }
}

static void
test_strips(void **state)
{
    static const uint64_t sizes[] = {4096, 12288, 16384, 20480, 65536};
    spw_quant forms[64] = {0};
    spw_error err = {0};
    spw_model_config c;
    spw_model *m = NULL;
    spw_layout l;
    (void)state;
    assert_int_equal(spw_hf_config_load(&c, "tests/vectors/families/gpt_oss_mxfp4", &err), SPW_OK);
    c.width = 160;
    c.mlp_width = 96;
    assert_int_equal(spw_model_build(&m, &c, &err), SPW_OK);
    assert_true(m->param_count <= 64);
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_param *p = &m->params[id];
        p->frozen = true;
        forms[id] = p->stack > 0 && p->ndim == 2 ? spw_codes_strips((uint32_t)p->cols, true) : SPW_QUANT_NONE;
    }
    for (uint32_t k = 0; k < 5 * 12; k++) {
        const uint32_t parts = 1 + k / 5 % 3;
        if (spw_layout_make(&l, m, sizes[k % 5], k / 15 % 2, k / 30, forms, false, 0, k % parts, parts, &err) != SPW_OK)
            fail_msg("%s", err.message);
        whole_strips(m, &l, sizes[k % 5]);
        spw_layout_free(&l);
    }
    spw_model_destroy(m);
}

/* A NaN among codes, and scales that are none, infinite, or so great that products may be. */
static void
test_no_numbers(void **state)
{
    static const damage bad[] = {{"", 0x7f, 1},
                                 {"", 0xff, 1},
                                 {"_scale_inv", 0x7fc00000, 4},
                                 {"_scale_inv", 0xff800000, 4},
                                 {"_scale_inv", 0x7b000000, 4}};
    static const damage good = {"_scale_inv", 0x7a000000, 4};
    const char *of = "tensor " DAMAGED " has codes or scales that are no finite numbers";
    char path[256];
    (void)state;
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        rig r;
        make_folder(path, false, &bad[k]);
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
        rig_lora(&r);
        from_folder(&r, path);
        rig_open(&r);
        assert_int_equal(spw_engine_load_weights(r.e, path, &r.err), SPW_ECORRUPT);
        if (strstr(r.err.message, of) == NULL)
            fail_msg("%s", r.err.message);
        rig_remove(&r);
        tiny_dir_remove(path);
    }
    make_folder(path, false, &good);
    {
        bound b = open_codes(path, SPW_F32);
        for (uint32_t id = 0; id < b.model->param_count; id++)
            if (b.forms[id] != SPW_QUANT_NONE)
                same_matrix(&b, id, SPW_F32);
        close_codes(&b);
    }
    tiny_dir_remove(path);
}

/* ---------------------------------------------------------------- weights alone */

static void
same_numbers(spw_engine *a, spw_engine *b, const spw_model *m)
{
    static float of_a[1 << 16], of_b[1 << 16];
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_error err = {0};
        spw_stretch held;
        spw_access at;
        assert_true(m->params[id].rows * m->params[id].cols <= 1 << 16);
        DONE(spw_access_find(&at, a, m->params[id].name, "weight", &err));
        DONE(spw_access_get_local(a, &at, of_a, &held, &err));
        DONE(spw_access_find(&at, b, m->params[id].name, "weight", &err));
        DONE(spw_access_get_local(b, &at, of_b, &held, &err));
        assert_memory_equal(of_a, of_b, m->params[id].rows * m->params[id].cols * sizeof *of_a);
    }
}

/* Of a checkpoint, as that has them or as numbers. */
static void
read_alone(rig *r, bool numbers, bool keeps)
{
    static spw_weights w;
    char path[400];
    spw_model *m = NULL;
    spw_engine *e = NULL;
    spw_error err = {0};
    bool kept = false;
    snprintf(path, sizeof path, "%s/step-1", r->dir);
    DONE(spw_weights_find(&w, path, &err));
    if (numbers)
        snprintf(w.config.run.frozen_codes, sizeof w.config.run.frozen_codes, "none");
    DONE(spw_model_from_config(&m, &w.config, &err));
    DONE(spw_engine_create(&e,
                           &(spw_engine_options){.config = &w.config,
                                                 .model = m,
                                                 .inference = true,
                                                 .weights_from = w.from,
                                                 .sequences = 1,
                                                 .positions = 16},
                           &err));
    DONE(spw_weights_load(&w, e, &err));
    for (uint32_t u = 0; u < spw_engine_layout(e)->unit_count; u++)
        kept = kept || spw_codes_group(spw_engine_layout(e)->units[u].form) > 0;
    assert_int_equal(kept, keeps);
    same_numbers(r->e, e, m);
    spw_engine_destroy(e);
    spw_model_destroy(m);
}

/* As a configuration says it, with its defaults: a checkpoint has that. */
static void
say_adapters(rig *r, const char *path, bool checkpoint_base)
{
    char text[2000];
    snprintf(
        text, sizeof text,
        "{\"model\": {\"path\": \"%s\"}, \"data\": {\"path\": [\"-\"], \"seq_length\": 16, \"tokenizer\": \"bytes\"}, "
        "\"train_batch_size\": 1, \"bf16\": {\"enabled\": true}, \"optimizer\": {\"type\": \"AdamW\", \"params\": "
        "{\"lr\": 1e-3}}, \"spillway\": {\"steps\": 1, \"lora\": {\"rank\": 4, \"targets\": [\"*_proj\"]}, "
        "\"frozen_codes\": \"published\", \"checkpoint_base\": %s, \"device\": \"cpu\"}}",
        path, checkpoint_base ? "true" : "false");
    rig_need(r, spw_config_parse(&r->c, text, "c.json", NULL, 0, &r->err));
    r->from = path;
}

/* Adapters alone have the codes of the folder that is found, whatever it was called; a whole checkpoint has numbers. */
static void
test_weights_alone(void **state)
{
    (void)state;
    for (int whole_one = 0; whole_one < 2; whole_one++) {
        char by_name[400];
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
        snprintf(by_name, sizeof by_name, "%s/by-name", r.dir);
        assert_int_equal(symlink(floats, by_name), 0);
        say_adapters(&r, by_name, whole_one);
        rig_open(&r);
        rig_fill(&r);
        rig_train(&r, 0, 1);
        rig_save(&r, 1);
        assert_int_equal(unlink(by_name), 0);
        read_alone(&r, false, !whole_one);
        read_alone(&r, true, false);
        rig_remove(&r);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_as_numbers), cmocka_unit_test(test_everywhere),    cmocka_unit_test(test_resumes),
        cmocka_unit_test(test_bytes),      cmocka_unit_test(test_refused),       cmocka_unit_test(test_not_set),
        cmocka_unit_test(test_read),       cmocka_unit_test(test_other_numbers), cmocka_unit_test(test_no_numbers),
        cmocka_unit_test(test_strips),     cmocka_unit_test(test_no_scale),      cmocka_unit_test(test_weights_alone),
    };
    return cmocka_run_group_tests_name("published", tests, make_folders, remove_folders);
}
