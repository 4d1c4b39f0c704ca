/*
 * Weights in Hugging Face's folders: an index and its shards that disagree, memory that is refused, and weights of another
 * model, by the name of the first tensor that says so.
 */
#include "lib_tiny.h"
#include "spw_files.h"
#include "spw_generate.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

/* A safetensors file of fp32 tensors (rows, cols), all elements `value`. */
static void
write_file(const char *dir, const char *name, const char *const *tensors, uint64_t rows, uint64_t cols, float value)
{
    spw_tensor_info infos[8] = {0};
    spw_st_writer *w = NULL;
    spw_error err = {0};
    uint32_t n = 0;
    char path[600];
    for (; tensors[n] != NULL; n++) {
        infos[n] = (spw_tensor_info){.dtype = SPW_F32, .ndim = 2, .shape = {rows, cols}};
        snprintf(infos[n].name, sizeof infos[n].name, "%s", tensors[n]);
    }
    snprintf(path, sizeof path, "%s/%s", dir, name);
    DONE(spw_st_writer_create(&w, path, infos, n, &err));
    for (uint32_t i = 0; i < n; i++) {
        for (uint64_t k = 0; k < rows * cols; k++)
            DONE(spw_st_write(w, i, 4 * k, &value, 4, &err));
    }
    DONE(spw_st_writer_commit(w, &err));
    spw_st_writer_destroy(w);
}

static void
write_index(const char *dir, const char *text)
{
    char path[600];
    spw_error err = {0};
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    DONE(spw_file_write_text(path, text, &err));
}

static void
expect_refusal(const char *dir, const char *says)
{
    spw_error err = {0};
    spw_hf_reader *r = NULL;
    long live = spw_test_live_allocs();
    if (spw_hf_reader_open(&r, dir, &err) == SPW_OK || strstr(err.message, says) == NULL)
        fail_msg("\"%s\" was expected: %s", says, err.message);
    assert_null(r);
    assert_int_equal(spw_test_live_allocs(), live);
}

#define NAMES(...)                                                                                                     \
    (const char *const[])                                                                                              \
    {                                                                                                                  \
        __VA_ARGS__, NULL                                                                                              \
    }

/* Each way in which an index and its shards can disagree. */
static void
test_shards(void **state)
{
    char dir[256], path[300];
    spw_error err = {0};
    spw_hf_reader *r = NULL;
    const char *file;
    float x[3];
    (void)state;
    tiny_dir_make(dir);
    expect_refusal(dir, "has none of model.safetensors, model.safetensors.index.json, pytorch_model.bin and "
                        "pytorch_model.bin.index.json");
    write_file(dir, "a.safetensors", NAMES("one", "two"), 1, 3, 1.0f);
    write_file(dir, "b.safetensors", NAMES("three"), 1, 3, 3.0f);
    write_index(dir,
                "{\"weight_map\":{\"one\":\"a.safetensors\",\"two\":\"a.safetensors\",\"three\":\"b.safetensors\"}}");
    DONE(spw_hf_reader_open(&r, dir, &err));
    assert_int_equal(spw_hf_reader_count(r), 3);
    assert_string_equal(spw_hf_reader_tensor(r, 2, &file)->name, "three");
    assert_string_equal(file + strlen(file) - 13, "b.safetensors");
    DONE(spw_hf_read(r, 2, 0, x, 12, &err));
    assert_true(x[0] == 3 && x[2] == 3);
    assert_int_equal(spw_hf_read(r, 2, 4, x, 12, &err), SPW_EINVAL);
    assert_null(spw_hf_reader_tensor(r, 3, NULL));
    spw_hf_reader_close(r);
    write_index(dir,
                "{\"weight_map\":{\"one\":\"a.safetensors\",\"two\":\"a.safetensors\",\"three\":\"c.safetensors\"}}");
    expect_refusal(dir, "lists three in shard c.safetensors: open ");
    write_index(dir, "{\"weight_map\":{\"one\":\"a.safetensors\",\"three\":\"b.safetensors\"}}");
    expect_refusal(dir, "a.safetensors is not listed");
    write_index(dir,
                "{\"weight_map\":{\"one\":\"a.safetensors\",\"two\":\"b.safetensors\",\"three\":\"b.safetensors\"}}");
    expect_refusal(dir, "lists tensor two in ");
    write_file(dir, "b.safetensors", NAMES("three", "two"), 1, 3, 3.0f);
    expect_refusal(dir, "tensor two is in two shards, ");
    write_index(dir, "{\"weight_map\":{\"one\":\"../a.safetensors\"}}");
    expect_refusal(dir, "weight_map.one is not the name of a file");
    write_index(dir, "{\"weight_map\":{}}");
    expect_refusal(dir, "weight_map is missing or empty");
    write_index(dir, "{\"weight_map\":{\"one\":\"a.safetensors\",\"one\":\"a.safetensors\"}}");
    expect_refusal(dir, "duplicate");
    write_index(dir,
                "{\"weight_map\":{\"one\":\"a.safetensors\",\"two\":\"a.safetensors\",\"three\":\"b.safetensors\"}}");
    snprintf(path, sizeof path, "%s/b.safetensors", dir);
    assert_int_equal(truncate(path, 100), 0);
    expect_refusal(dir, "b.safetensors");
    expect_refusal("/no/such/folder", "/no/such/folder");
    tiny_dir_remove(dir);
}

/* What is read from a mapping is refused where its file was cut off meanwhile: its pages would end the process. */
static void
test_cut_off(void **state)
{
    const char *from = "tests/vectors/families/gpt_oss_mxfp4";
    char dir[256], path[600], command[900];
    spw_model_config c;
    spw_model *m = NULL;
    spw_hf_reader *r = NULL;
    spw_error err = {0};
    float x[64];
    uint32_t refused = 0;
    (void)state;
    tiny_dir_make(dir);
    snprintf(command, sizeof command, "cp %s/config.json %s/model.safetensors %s", from, from, dir);
    assert_int_equal(system(command), 0);
    DONE(spw_hf_config_load(&c, dir, &err));
    DONE(spw_model_build(&m, &c, &err));
    DONE(spw_hf_reader_open(&r, dir, &err));
    DONE(spw_hf_reader_bind(r, m, &err));
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    for (uint32_t id = 0; id < m->param_count; id++)
        DONE(spw_hf_read_param(r, id, 0, 1, x, &err));
    assert_int_equal(truncate(path, 4096), 0);
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_error own = {0};
        if (spw_hf_read_param(r, id, 0, 1, x, &own) == SPW_OK)
            continue;
        assert_non_null(strstr(own.message, "model.safetensors"));
        refused++;
    }
    assert_true(refused > 0);
    spw_hf_reader_close(r);
    spw_model_destroy(m);
    tiny_dir_remove(dir);
}

/* The k-th allocation fails, for every k: nothing is left behind. */
static void
test_no_memory(void **state)
{
    bool through = false;
    (void)state;
    for (unsigned k = 1; !through; k++) {
        spw_hf_reader *r = NULL;
        spw_error err = {0};
        long live = spw_test_live_allocs();
        spw_status st;
        spw_test_fail_alloc(k);
        st = spw_hf_reader_open(&r, "tests/vectors/families/qwen2", &err);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        spw_hf_reader_close(r);
        assert_int_equal(spw_test_live_allocs(), live);
    }
}

static void
bind_case(const char *name, const char *change, const char *says)
{
    char folder[200];
    spw_model_config m;
    spw_model *model = NULL;
    spw_hf_reader *r = NULL;
    spw_error err = {0};
    snprintf(folder, sizeof folder, "tests/vectors/families/%s", name);
    DONE(spw_hf_config_load(&m, folder, &err));
    if (strcmp(change, "wider MLP") == 0)
        m.mlp_width++;
    else if (strcmp(change, "layers") == 0)
        m.layers--;
    else if (strcmp(change, "more layers") == 0)
        m.layers++;
    else if (strcmp(change, "tied") == 0)
        m.tied = !m.tied;
    else if (strcmp(change, "bias") == 0)
        m.qkv_bias = !m.qkv_bias;
    DONE(spw_model_build(&model, &m, &err));
    DONE(spw_hf_reader_open(&r, folder, &err));
    if (spw_hf_reader_bind(r, model, &err) != SPW_ECORRUPT || strstr(err.message, says) == NULL)
        fail_msg("%s, %s: \"%s\" was expected: %s", name, change, says, err.message);
    spw_hf_reader_close(r);
    spw_model_destroy(model);
}

/* Weights of another model are refused by the name of the first tensor that says so. */
static void
test_other_model(void **state)
{
    (void)state;
    bind_case("llama", "wider MLP", "mlp.down_proj.weight has shape [18, 29], this model needs [18, 30]");
    bind_case("gpt2", "wider MLP", "has shape [72], this model needs [73]");
    bind_case("llama", "layers", "tensor model.layers.1.");
    bind_case("llama3", "more layers", "tensor model.layers.2.input_layernorm.weight is missing");
    bind_case("llama", "tied", "tensor lm_head.weight is missing; where the head is the embeddings, config.json says");
    bind_case("llama3", "tied", "lm_head.weight differs from model.embed_tokens.weight");
    bind_case("gpt2_untied", "tied", "lm_head.weight differs from wte.weight");
    bind_case("qwen2", "bias", "proj.bias is not in this model");
    bind_case("qwen3", "bias", "self_attn.q_proj.bias is missing");
}

typedef struct mixture {
    spw_model_config config;
    spw_model *model;
    spw_hf_reader *each; /* of a folder with tensors of each expert */
} mixture;

static void
open_mixture(mixture *x, const char *name)
{
    char folder[200];
    spw_error err = {0};
    snprintf(folder, sizeof folder, "tests/vectors/families/%s", name);
    DONE(spw_hf_config_load(&x->config, folder, &err));
    DONE(spw_model_build(&x->model, &x->config, &err));
    DONE(spw_hf_reader_open(&x->each, folder, &err));
    DONE(spw_hf_reader_bind(x->each, x->model, &err));
}

static void
close_mixture(mixture *x)
{
    spw_hf_reader_close(x->each);
    spw_model_destroy(x->model);
}

/* How transformers 5 names it in memory, and where it lies there; rows of the whole. */
static uint64_t
place_together(const mixture *x, uint32_t id, char name[160], uint64_t *first)
{
    static const char *const kinds[3][3] = {
        {"gate_proj", "w1", "gate_up_proj"}, {"up_proj", "w3", "gate_up_proj"}, {"down_proj", "w2", "down_proj"}};
    const spw_param *p = &x->model->params[id];
    const char *older = strstr(p->name, "block_sparse_moe");
    uint64_t elems = p->rows * p->cols;
    *first = 0;
    snprintf(name, 160, "%.*s%s%s", (int)(older != NULL ? older - p->name : 0), p->name, older != NULL ? "mlp" : "",
             older != NULL ? older + strlen("block_sparse_moe") : p->name);
    if (p->expert == 0)
        return p->rows;
    for (int k = 0; k < 3; k++) {
        char end[40];
        for (int i = 0; i < 2; i++) {
            snprintf(end, sizeof end, ".%u.%s.weight", p->expert - 1, kinds[k][i]);
            if (strlen(name) > strlen(end) && strcmp(name + strlen(name) - strlen(end), end) == 0) {
                snprintf(name + strlen(name) - strlen(end), 40, ".%s", kinds[k][2]);
                *first = (p->expert - 1) * (k < 2 ? 2 : 1) * elems + (k == 1 ? elems : 0);
                return k < 2 ? 2 * p->rows : p->rows;
            }
        }
    }
    fail_msg("%s", p->name);
    return 0;
}

/* The tensors of such a file in infos, which parameter is in which, and how many. */
static uint32_t
list_together(const mixture *x, uint64_t missing, spw_tensor_info *infos, uint32_t *of)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < x->model->param_count; id++) {
        const spw_param *p = &x->model->params[id];
        uint64_t first, rows;
        spw_st_describe(&infos[n], p, SPW_F32);
        rows = place_together(x, id, infos[n].name, &first);
        for (of[id] = 0; strcmp(infos[of[id]].name, infos[n].name) != 0; of[id]++)
            ;
        if (of[id] < n)
            continue;
        if (p->expert > 0) {
            infos[n].ndim = 3;
            infos[n].shape[0] = x->config.experts;
            infos[n].shape[1] = rows - missing;
            infos[n].shape[2] = p->cols;
        }
        n++;
    }
    return n;
}

/* Numbers that a file has in fp32 of a parameter; of biases in terms none are looked at. */
static uint64_t
elems_of(const mixture *x, uint32_t id)
{
    const spw_param *p = &x->model->params[id];
    return p->in_terms ? 0 : p->rows * p->cols;
}

static const spw_param *
first_of_experts(const mixture *x)
{
    const spw_param *p = x->model->params;
    while (p->expert == 0)
        p++;
    return p;
}

/* All of x in fp32, each layer's experts in two tensors, of each expert's rows so many less, and one more of its matrices by that name, if not NULL. */
static void
write_together(const mixture *x, const char *dir, uint64_t missing, const char *more)
{
    spw_tensor_info *infos = calloc(x->model->param_count + 1, sizeof *infos);
    uint32_t *of = calloc(x->model->param_count, sizeof *of), n;
    char path[300];
    spw_st_writer *w = NULL;
    spw_error err = {0};
    assert_true(infos != NULL && of != NULL);
    n = list_together(x, missing, infos, of);
    spw_st_describe(&infos[n], first_of_experts(x), SPW_F32);
    if (more != NULL)
        snprintf(infos[n].name, sizeof infos[n].name, "%s", more);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    DONE(spw_st_writer_create(&w, path, infos, n + (more != NULL), &err));
    for (uint32_t id = 0; missing == 0 && id < x->model->param_count; id++) {
        char name[160];
        uint64_t first;
        (void)place_together(x, id, name, &first);
        for (uint64_t i = 0; i < elems_of(x, id); i++) {
            float v;
            DONE(spw_hf_read_param(x->each, id, i, 1, &v, &err));
            DONE(spw_st_write(w, of[id], 4 * (first + i), &v, 4, &err));
        }
    }
    DONE(spw_st_writer_commit(w, &err));
    spw_st_writer_destroy(w);
    free(infos);
    free(of);
}

/* What element i of a parameter is in the next test. */
static float
value_of(uint32_t id, uint64_t i)
{
    return (float)(id * 1000 + i);
}

/* All of x, of each element its value; is_turned: experts' matrices are (in, out). */
static void
write_values(const mixture *x, const char *dir, bool is_turned)
{
    spw_tensor_info infos[64] = {0};
    uint32_t of[64], n;
    char path[300];
    spw_st_writer *w = NULL;
    spw_error err = {0};
    assert_true(x->model->param_count < 64);
    n = list_together(x, 0, infos, of);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t rows = infos[i].shape[1];
        if (is_turned && infos[i].ndim == 3) {
            infos[i].shape[1] = infos[i].shape[2];
            infos[i].shape[2] = rows;
        }
    }
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    DONE(spw_st_writer_create(&w, path, infos, n, &err));
    for (uint32_t id = 0; id < x->model->param_count; id++) {
        const spw_param *p = &x->model->params[id];
        char name[160];
        uint64_t first, rows = place_together(x, id, name, &first);
        for (uint64_t i = 0; i < p->rows * p->cols; i++) {
            const float v = value_of(id, i);
            uint64_t at = first + i, whole = rows * p->cols;
            if (is_turned && p->expert > 0)
                at = at / whole * whole + at % whole % p->cols * rows + at % whole / p->cols;
            DONE(spw_st_write(w, of[id], 4 * at, &v, 4, &err));
        }
    }
    DONE(spw_st_writer_commit(w, &err));
    spw_st_writer_destroy(w);
}

/* Qwen3-VL's experts lie (in, out) or (out, in), and where one of their tensors is square the other says which. */
static void
test_experts_turned(void **state)
{
    static const int widths[] = {4, 8, 5}; /* the first: gate and up together are square; the second: down is */
    char dir[256], text[900], path[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
    for (int k = 0; k < 6; k++) {
        spw_hf_reader *r = NULL;
        spw_error err = {0};
        mixture x = {.model = NULL};
        snprintf(
            text, sizeof text,
            "{\"model_type\":\"qwen3_vl_moe\",\"text_config\":{\"model_type\":\"qwen3_vl_moe_text\",\"vocab_size\":9,"
            "\"hidden_size\":8,\"num_hidden_layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
            "\"head_dim\":4,\"max_position_embeddings\":16,\"num_experts\":3,\"num_experts_per_tok\":2,"
            "\"moe_intermediate_size\":%d}}",
            widths[k / 2]);
        DONE(spw_file_write_text(path, text, &err));
        DONE(spw_hf_config_load(&x.config, dir, &err));
        DONE(spw_model_build(&x.model, &x.config, &err));
        write_values(&x, dir, k % 2 == 1);
        DONE(spw_hf_reader_open(&r, dir, &err));
        DONE(spw_hf_reader_bind(r, x.model, &err));
        for (uint32_t id = 0; id < x.model->param_count; id++) {
            for (uint64_t i = 0; i < x.model->params[id].rows * x.model->params[id].cols; i++) {
                float got;
                DONE(spw_hf_read_param(r, id, i, 1, &got, &err));
                if (got != value_of(id, i))
                    fail_msg("%d: %s[%llu] is %g", k, x.model->params[id].name, (unsigned long long)i, (double)got);
            }
        }
        spw_hf_reader_close(r);
        spw_model_destroy(x.model);
    }
    tiny_dir_remove(dir);
}

/* Experts in tensors of all of a layer's, as transformers 5 has them in memory, and so in what FSDP saves: the same numbers. */
static void
test_experts_together(void **state)
{
    static const char *const names[] = {"qwen3_moe", "mixtral", "minimax_m2", "olmoe"};
    static const char *const says[] = {"has shape [", "is there twice", "for experts of 8-bit floats in one tensor"};
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        spw_hf_reader *r = NULL;
        spw_error err = {0};
        mixture x;
        open_mixture(&x, names[k]);
        write_together(&x, dir, 0, NULL);
        DONE(spw_hf_reader_open(&r, dir, &err));
        assert_true(spw_hf_reader_count(r) < spw_hf_reader_count(x.each));
        DONE(spw_hf_reader_bind(r, x.model, &err));
        for (uint32_t id = 0; id < x.model->param_count; id++) {
            for (uint64_t i = 0; i < elems_of(&x, id); i++) {
                float want, got;
                DONE(spw_hf_read_param(x.each, id, i, 1, &want, &err));
                DONE(spw_hf_read_param(r, id, i, 1, &got, &err));
                assert_memory_equal(&want, &got, sizeof got);
            }
        }
        spw_hf_reader_close(r);
        for (int wrong = 0; wrong < 3; wrong++) {
            write_together(&x, dir, wrong == 0,
                           wrong == 0   ? NULL
                           : wrong == 1 ? first_of_experts(&x)->name
                                        : "model.layers.0.mlp.experts.down_proj_scale_inv");
            DONE(spw_hf_reader_open(&r, dir, &err));
            if (spw_hf_reader_bind(r, x.model, &err) != SPW_ECORRUPT || strstr(err.message, says[wrong]) == NULL)
                fail_msg("%s: %s", names[k], err.message);
            err = (spw_error){0};
            spw_hf_reader_close(r);
        }
        close_mixture(&x);
    }
    tiny_dir_remove(dir);
}

/* A bf16 folder's copy, in which tensors whose names end so are fp32. */
static void
copy_wider(const char *from, const char *dir, const char *end)
{
    char path[300], command[700];
    spw_hf_reader *r = NULL;
    spw_st_writer *w = NULL;
    spw_error err = {0};
    spw_tensor_info *infos;
    DONE(spw_hf_reader_open(&r, from, &err));
    infos = calloc(spw_hf_reader_count(r), sizeof *infos);
    assert_non_null(infos);
    for (uint32_t i = 0; i < spw_hf_reader_count(r); i++) {
        infos[i] = *spw_hf_reader_tensor(r, i, NULL);
        if (strlen(infos[i].name) > strlen(end) &&
            strcmp(infos[i].name + strlen(infos[i].name) - strlen(end), end) == 0)
            infos[i].dtype = SPW_F32;
    }
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    snprintf(command, sizeof command, "cp %s/config.json %s/", from, dir);
    assert_int_equal(system(command), 0);
    DONE(spw_st_writer_create(&w, path, infos, spw_hf_reader_count(r), &err));
    for (uint32_t i = 0; i < spw_hf_reader_count(r); i++) {
        const spw_tensor_info *t = spw_hf_reader_tensor(r, i, NULL);
        uint64_t elems = t->bytes / spw_dtype_bytes(t->dtype);
        char *data = malloc(t->bytes), *wide = malloc(4 * elems);
        assert_true(data != NULL && wide != NULL);
        DONE(spw_hf_read(r, i, 0, data, t->bytes, &err));
        spw_convert(wide, infos[i].dtype, data, t->dtype, elems);
        DONE(spw_st_write(w, i, 0, wide, elems * spw_dtype_bytes(infos[i].dtype), &err));
        free(data);
        free(wide);
    }
    DONE(spw_st_writer_commit(w, &err));
    spw_st_writer_destroy(w);
    spw_hf_reader_close(r);
    free(infos);
}

/* Qwen3.5 is published with two vectors of linear attention in fp32: generate and eval do not make fp32 of everything for them. */
static void
test_wide_vectors(void **state)
{
    static const struct {
        const char *end;
        spw_state_format format;
    } cases[] = {{"linear_attn.A_log", SPW_STATE_MIXED},
                 {"linear_attn.norm.weight", SPW_STATE_MIXED},
                 {"linear_attn.conv1d.weight", SPW_STATE_FP32},
                 {"input_layernorm.weight", SPW_STATE_FP32}};
    static spw_weights weights;
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        spw_error err = {0};
        copy_wider("tests/vectors/families/qwen3_5_images", dir, cases[k].end);
        DONE(spw_weights_find(&weights, dir, &err));
        assert_int_equal(weights.config.run.state_format, cases[k].format);
    }
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards),         cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_no_memory),      cmocka_unit_test(test_other_model),
        cmocka_unit_test(test_experts_turned), cmocka_unit_test(test_experts_together),
        cmocka_unit_test(test_wide_vectors),
    };
    return cmocka_run_group_tests_name("hf_folder", tests, NULL, NULL);
}
