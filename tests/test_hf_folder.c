/*
 * Weights in Hugging Face's folders: an index and its shards that disagree, memory that is refused, and weights of another
 * model, by the name of the first tensor that says so.
 */
#include "lib_tiny.h"
#include "spw_files.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
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
    bind_case("llama", "tied", "tensor lm_head.weight is missing");
    bind_case("llama3", "tied", "lm_head.weight differs from model.embed_tokens.weight");
    bind_case("gpt2_untied", "tied", "lm_head.weight differs from wte.weight");
    bind_case("qwen2", "bias", "proj.bias is not in this model");
    bind_case("qwen3", "bias", "self_attn.q_proj.bias is missing");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_other_model),
    };
    return cmocka_run_group_tests_name("hf_folder", tests, NULL, NULL);
}
