/*
 * A checkpoint's manifest: what is written is read back, and each field that is not what it must be is refused by name.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define BEGIN   "{\"format\":2,\"step\":3,\"data_position\":12,\"updates\":3,\"bytes_written\":9,\"tokens\":384.0"
#define DIGESTS ",\"digests\":{\"model.safetensors\":\"0123456789abcdef\"}"
#define CONFIG  ",\"config\":{\"a\":1}"

/* All fields, with and without the parts that may be missing. */
static void
test_round_trip(void **state)
{
    (void)state;
    for (int parts = 0; parts < 4; parts++) {
        spw_manifest m, again;
        spw_error err = {0};
        char *text;
        memset(&m, 0, sizeof m);
        m.state = (spw_checkpoint_state){
            .step = 1ull << 40, .data_position = 7, .updates = 5, .bytes_written = 11, .tokens = 1e15};
        snprintf(m.digests[SPW_DIGEST_MODEL], sizeof m.digests[0], "0123456789abcdef");
        if (parts == 3) { /* of adapters alone */
            memset(m.digests[SPW_DIGEST_MODEL], 0, sizeof m.digests[0]);
            snprintf(m.base, sizeof m.base, "/mnt/\"models\"/base");
            snprintf(m.base_digest, sizeof m.base_digest, "00ff00ff00ff00ff");
        }
        if (parts & 1) {
            m.state.data = (spw_data_summary){
                2, 3, 4, "text, \"quoted\"", "tokenizer 00ff", .held_out = 5, .held_out_known = true};
            snprintf(m.digests[SPW_DIGEST_ADAPTER], sizeof m.digests[0], "fedcba9876543210");
        }
        if (parts & 2) {
            m.scaled = true;
            m.scaler = (spw_loss_scaler){.scale = 65536.5, .hysteresis = 2, .steps = 100, .last_overflow = -1};
        }
        m.config = json_pack("{s:{s:i}}", "spillway", "steps", 3);
        text = spw__manifest_text(&m);
        assert_non_null(text);
        if (spw__manifest_parse(&again, text, "m", &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_true(json_equal(m.config, again.config));
        assert_true(memcmp(m.digests, again.digests, sizeof m.digests) == 0 && m.scaled == again.scaled);
        assert_true(m.state.step == again.state.step && m.state.data_position == again.state.data_position &&
                    m.state.updates == again.state.updates && m.state.bytes_written == again.state.bytes_written &&
                    m.state.tokens == again.state.tokens && m.state.data.files == again.state.data.files &&
                    m.state.data.bytes == again.state.data.bytes && m.state.data.tokens == again.state.data.tokens);
        assert_true(m.state.data.held_out == again.state.data.held_out &&
                    m.state.data.held_out_known == again.state.data.held_out_known);
        assert_string_equal(m.base, again.base);
        assert_string_equal(m.base_digest, again.base_digest);
        assert_string_equal(m.state.data.formats, again.state.data.formats);
        assert_string_equal(m.state.data.encoder, again.state.data.encoder);
        assert_true(m.scaler.scale == again.scaler.scale && m.scaler.hysteresis == again.scaler.hysteresis &&
                    m.scaler.steps == again.scaler.steps && m.scaler.last_overflow == again.scaler.last_overflow);
        free(text);
        spw__manifest_free(&m);
        spw__manifest_free(&again);
    }
}

static void
test_refusals(void **state)
{
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"", "m:1:0: "},
        {"{\n \"format\": 1,\n 7}", "m:3:2: "},
        {BEGIN, "m:1:84: "},
        {"[1]", "m: format: expected 2 (a checkpoint of this version) or 1, got nothing"},
        {"{\"format\":3}", "m: format: expected 2 (a checkpoint of this version) or 1, got 3"},
        {"{\"format\":0}", "or 1, got 0"},
        {"{\"format\":1,\"format\":1}", "duplicate"},
        {"{\"format\":1}", "m: step: expected an integer of at least 0, got nothing"},
        {"{\"format\":1,\"step\":\"3\"}", "m: step: expected an integer of at least 0, got \"3\""},
        {"{\"format\":1,\"step\":-3}", "m: step: expected an integer of at least 0, got -3"},
        {"{\"format\":1,\"step\":3}", "m: data_position: expected"},
        {"{\"format\":1,\"step\":3,\"data_position\":1}", "m: updates: expected"},
        {"{\"format\":1,\"step\":3,\"data_position\":1,\"updates\":1.5}", "m: updates: expected"},
        {"{\"format\":1,\"step\":3,\"data_position\":1,\"updates\":1,\"bytes_written\":-1}", "m: bytes_written: "},
        {"{\"format\":1,\"step\":3,\"data_position\":1,\"updates\":1,\"tokens\":\"many\"}",
         "m: tokens: expected a number of at least 0, got \"many\""},
        {BEGIN CONFIG "}", "m: digests: expected an object, got nothing"},
        {BEGIN CONFIG ",\"digests\":{}}", "m: digests.model.safetensors: expected"},
        {BEGIN CONFIG ",\"digests\":{\"model.safetensors\":\"0123456789abcdeg\"}}",
         "m: digests.model.safetensors: expected 16 hexadecimal digits, got \"0123456789abcdeg\""},
        {BEGIN CONFIG ",\"digests\":{\"model.safetensors\":\"0123456789abcdef0\"}}", "less than 17 bytes"},
        {BEGIN DIGESTS CONFIG ",\"base\":\"/b\"}", "m: base: expected an object, got \"/b\""},
        {BEGIN DIGESTS CONFIG ",\"base\":{\"path\":\"/b\"}}", "m: base.fingerprint: expected"},
        {BEGIN DIGESTS CONFIG ",\"base\":{\"path\":\"/b\",\"fingerprint\":\"0123\"}}",
         "m: base.fingerprint: expected 16 hexadecimal digits, got \"0123\""},
        {BEGIN DIGESTS CONFIG ",\"base\":{\"path\":\"b\",\"fingerprint\":\"0123456789abcdef\"}}",
         "m: base.path: expected a path from the root, got \"b\""},
        {BEGIN DIGESTS "}", "m: config: expected an object, got nothing"},
        {BEGIN DIGESTS ",\"config\":[]}", "m: config: expected an object, got []"},
        {BEGIN DIGESTS CONFIG ",\"data\":3}", "m: data: expected an object, got 3"},
        {BEGIN DIGESTS CONFIG ",\"data\":{\"files\":0}}", "m: data.files: expected an integer of at least 1, got 0"},
        {BEGIN DIGESTS CONFIG ",\"data\":{\"files\":1,\"bytes\":1,\"tokens\":1,\"formats\":7}}", "m: data.formats: "},
        {BEGIN DIGESTS CONFIG ",\"data\":{\"files\":1,\"bytes\":1,\"tokens\":1,\"formats\":\"\",\"encoder\":null}}",
         "m: data.encoder: expected a text of less than 64 bytes, got null"},
        {BEGIN DIGESTS CONFIG ",\"loss_scale\":{\"scale\":0}}",
         "m: loss_scale.scale: expected a number above 0, got 0"},
        {BEGIN DIGESTS CONFIG ",\"loss_scale\":{\"scale\":2,\"hysteresis\":0}}", "m: loss_scale.hysteresis: "},
        {BEGIN DIGESTS CONFIG ",\"loss_scale\":{\"scale\":2,\"hysteresis\":1,\"steps\":1}}",
         "m: loss_scale.last_overflow: expected"},
    };
    spw_manifest m;
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw__manifest_parse(&m, BEGIN DIGESTS CONFIG ",\"unheard_of\":1}", "m", &err), SPW_OK);
    assert_true(m.digests_known);
    spw__manifest_free(&m);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        if (spw__manifest_parse(&m, wrong[i].text, "m", &err) != SPW_ECORRUPT ||
            strstr(err.message, wrong[i].says) == NULL)
            fail_msg("%s: message is: %s", wrong[i].says, err.message);
        assert_null(m.config);
    }
}

/* Both keys of decay are in every manifest: what an older version did with them goes on. */
static void
test_decay(void **state)
{
    static const struct {
        const char *type, *mode, *becomes;
        bool decoupled;
    } cases[] = {{"Adam", "false", "Adam", false},
                 {"Adam", "true", "Adam", true},
                 {"AdamW", "true", "AdamW", true},
                 {"AdamW", "false", "Adam", false}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static spw_config c;
        spw_manifest m;
        spw_error err = {0};
        char text[1000];
        snprintf(text, sizeof text,
                 BEGIN DIGESTS
                 ",\"config\":{\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1},"
                 "\"data\":{\"path\":\"a\"},\"train_batch_size\":1,\"optimizer\":{\"type\":\"%s\",\"params\":"
                 "{\"adam_w_mode\":%s,\"weight_decay\":0.01}}}}",
                 cases[i].type, cases[i].mode);
        assert_int_equal(spw__manifest_parse(&m, text, "m", &err), SPW_OK);
        if (spw__manifest_config(&m, "m", &c, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_string_equal(c.optimizer.type, cases[i].becomes);
        assert_true(c.optimizer.adam_w_mode == cases[i].decoupled && c.optimizer.weight_decay == 0.01);
        spw__manifest_free(&m);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trip), cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_decay)};
    return cmocka_run_group_tests_name("manifest", tests, NULL, NULL);
}
