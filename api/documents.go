package api

import (
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (s *server) documentRoutes() []route {
	upload := route{
		method: "POST", path: "/v1/documents", body: FileForm{}, response: documents.Document{},
		status: http.StatusCreated, maxBody: s.documentBytes + documents.FormOverhead,
		params: []param{
			textParam("name", "The file name, for a body that is the file itself"),
			textParam("thread_id", "The thread with access to it"),
		},
		about: "Store a document: multipart/form-data with a part named file, or the file itself as the body. " +
			"The content type is detected from the content. 413 names the limit.",
	}
	upload.httpHandler = s.rawHandler(upload, s.addDocument)
	content := route{
		method: "GET", path: "/v1/documents/{id}/content", contentType: "application/octet-stream",
		about: "The content of a document, always as an attachment.",
	}
	content.httpHandler = s.rawHandler(content, s.sendDocument)
	return []route{
		upload,
		{
			method: "GET", path: "/v1/documents", response: page[documents.Document]{}, handle: s.listDocuments,
			about: "Documents without their content, newest first.",
			params: listParams(textParam("thread_id", "Only this thread"), param{
				name: "execution_id", about: "Only this execution", check: checkUUID,
			}),
		},
		{
			method: "GET", path: "/v1/documents/{id}", response: documents.Document{}, handle: s.getDocument,
			about: "One document without its content.",
		},
		content,
		{
			method: "DELETE", path: "/v1/documents/{id}", body: reasonRequest{}, response: change{}, handle: s.deleteDocument,
			about: "Delete a document permanently.",
		},
	}
}

// rawHandler wraps a function that reads the body or writes the response itself.
func (s *server) rawHandler(rt route, handle func(http.ResponseWriter, request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query, err := readQuery(r.URL.RawQuery, rt.params)
		if err == nil {
			err = handle(w, request{Request: r, query: query})
		}
		if err != nil {
			s.writeError(w, r, rt, err, "")
		}
	})
}

// addDocument stores an upload of at most documentBytes, and its entry in the audit log in the same transaction.
func (s *server) addDocument(w http.ResponseWriter, r request) error {
	u, err := documents.ReadForm(r.Request, s.documentBytes, true)
	if err != nil {
		return err
	}
	if name := r.query["name"]; name != "" {
		u.Name = name
	}
	u.ThreadID, u.By = r.query["thread_id"], threads.Admin
	var d documents.Document
	input := map[string]any{"name": documents.CleanName(u.Name)}
	done, err := s.record(r.Context(), "add_document", "", input, func(tx pgx.Tx, traceID string) (any, error) {
		u.TraceID = traceID
		if d, err = documents.Add(r.Context(), tx, u); err != nil {
			return nil, err
		}
		input["document"] = d.ID
		return d.Audit(), nil
	})
	if err != nil {
		return err
	}
	s.write(w, r.Request, route{}, response{status: http.StatusCreated, body: d, trace: done.TraceID})
	return nil
}

func (s *server) listDocuments(r request) (response, error) {
	list, err := readPage("documents", r.query, func(d documents.Document) string { return d.ID },
		func(before string, limit int) ([]documents.Document, error) {
			return documents.List(r.Context(), s.pool, documents.Filter{
				ThreadID: r.query["thread_id"], ExecutionID: r.query["execution_id"], Before: before, Limit: limit,
			})
		})
	return response{body: list}, err
}

func (s *server) getDocument(r request) (response, error) {
	id, err := pathUUID(r, "a document")
	if err != nil {
		return response{}, err
	}
	d, err := documents.Get(r.Context(), s.pool, id)
	return response{body: d}, err
}

func (s *server) sendDocument(w http.ResponseWriter, r request) error {
	id, err := pathUUID(r, "a document")
	if err != nil {
		return err
	}
	d, err := documents.Get(r.Context(), s.pool, id)
	if err != nil {
		return err
	}
	return documents.WriteAttachment(r.Context(), w, s.pool, d)
}

func (s *server) deleteDocument(r request) (response, error) {
	id, err := pathUUID(r, "a document")
	if err != nil {
		return response{}, err
	}
	c, err := s.record(r.Context(), "delete_document", r.body.(reasonRequest).Reason, map[string]any{"document": id},
		func(tx pgx.Tx, _ string) (any, error) {
			d, err := documents.Delete(r.Context(), tx, id)
			return d.Audit(), err
		})
	if err != nil {
		return response{}, err
	}
	c.Name, c.Changed = id, true
	return response{body: c, trace: c.TraceID}, nil
}
