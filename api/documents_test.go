package api_test

import (
	"bytes"
	"encoding/json"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// fileForm is a multipart body with one file, and its content type.
func fileForm(t *testing.T, name, content string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, err := w.CreateFormFile("file", name)
	if err == nil {
		_, err = part.Write([]byte(content))
	}
	if err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	return b.String(), w.FormDataContentType()
}

func stored(t *testing.T, body []byte) (d documents.Document) {
	t.Helper()
	if err := json.Unmarshal(body, &d); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return d
}

func TestAnAdminStoresFetchesAndDeletesADocument(t *testing.T) {
	t.Parallel()
	a := start(t)
	exec(t, a.pool, `insert into agent_threads (id, channel, owner_kind, owner) values ('maria', 'chat', 'admin', 'admin')`)
	body, kind := fileForm(t, "../../a \"b\".html", "<html><script>alert(1)</script>")
	w := a.raw("POST", "/v1/documents?thread_id=maria", body, having("Content-Type", kind))
	if w.Code != 201 || w.Header().Get("X-Trace-Id") == "" {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	d := stored(t, w.Body.Bytes())
	if d.Name != `a "b".html` || d.ContentType != "text/html" || d.ThreadID == nil || *d.ThreadID != "maria" {
		t.Errorf("%+v", d)
	}
	raw := stored(t, a.raw("POST", "/v1/documents?name=x.bin", "\x00\x01", having("Content-Type", "application/x-thing")).Body.Bytes())
	if raw.Name != "x.bin" || raw.Size != 2 || raw.ThreadID != nil {
		t.Errorf("%+v", raw)
	}
	got := a.raw("GET", "/v1/documents/"+d.ID+"/content", "", asAdmin())
	h := got.Header()
	if got.Body.String() != "<html><script>alert(1)</script>" || h.Get("X-Content-Type-Options") != "nosniff" ||
		!strings.HasPrefix(h.Get("Content-Disposition"), "attachment") || h.Get("Content-Security-Policy") == "" {
		t.Errorf("%v %s", h, got.Body)
	}
	var list struct{ Items []documents.Document }
	a.get("/v1/documents?thread_id=maria", &list)
	if len(list.Items) != 1 || list.Items[0].ID != d.ID {
		t.Errorf("%+v", list)
	}
	if w := a.raw("DELETE", "/v1/documents/"+d.ID, `{"reason":"by mistake"}`, asAdmin()); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	a.refused(a.raw("GET", "/v1/documents/"+d.ID, "", asAdmin()), 404, "no such document")
	a.refused(a.raw("GET", "/v1/documents/"+d.ID+"/content", "", asAdmin()), 404, "no such document")
	a.refused(a.raw("DELETE", "/v1/documents/"+d.ID, `{"reason":"again"}`, asAdmin()), 404, "no such document")
	acts := value[string](t, a.pool, `
		select string_agg(skill_name || coalesce(input ->> 'document', ''), ' ' order by id) from agent_activity where skill_name like '%\_document'`)
	if acts != "add_document"+d.ID+" add_document"+raw.ID+" delete_document"+d.ID {
		t.Errorf("the audit has %s", acts)
	}
	if n := value[int](t, a.pool, `select count(*) from agent_activity a where a::text like '%alert(1)%'`); n != 0 {
		t.Error("the audit has the content")
	}
}

func TestAnUploadThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := wired(t, api.Options{Pool: pool, Engine: engine(t, pool), DocumentBytes: 2000})
	noFile, kind := fileForm(t, "a", "x")
	noFile = strings.Replace(noFile, `name="file"`, `name="other"`, 1)
	large, largeKind := fileForm(t, "a", strings.Repeat("x", 2001))
	for what, c := range map[string]struct {
		path, body, kind string
		status           int
		says             string
	}{
		"too large":       {"", strings.Repeat("x", 2001), "text/plain", 413, "at most 2000 bytes are stored"},
		"too large form":  {"", large, largeKind, 413, "at most 2000 bytes are stored"},
		"far too large":   {"", strings.Repeat("x", 100_000), "text/plain", 413, "bytes"},
		"empty":           {"", "", "text/plain", 400, "empty"},
		"no file":         {"", noFile, kind, 400, "no part named file"},
		"broken form":     {"", "x", kind, 400, "no file"},
		"unknown thread":  {"?thread_id=nobody", "x", "text/plain", 404, "thread"},
		"wrong parameter": {"?thread=nobody", "x", "text/plain", 400, "no parameter"},
	} {
		t.Run(what, func(t *testing.T) {
			a.refused(a.raw("POST", "/v1/documents"+c.path, c.body, having("Content-Type", c.kind)), c.status, c.says)
		})
	}
	if w := a.raw("POST", "/v1/documents", "x", http.Header{}); w.Code != 401 {
		t.Errorf("without a token: %d", w.Code)
	}
	if n := value[int](t, a.pool, `select count(*) from agent_documents`); n != 0 {
		t.Errorf("%d documents are there", n)
	}
}
