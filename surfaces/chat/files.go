package chat

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	maxFiles   = 10   // of one message
	maxExcerpt = 4000 // bytes of a document that the model reads with the message

	maxImageBytes = 2 * threads.MaxImageSize // of the images among the files of a request
)

// FilesHandler serves POST /v1/files: a document of the visitor, for a message that names its id.
func (c *Chat) FilesHandler() http.Handler { return c.handler(c.upload) }

func (c *Chat) upload(w http.ResponseWriter, r *http.Request, id trace.ID) error {
	secret, created, err := c.visitorToken(r)
	if err != nil {
		return err
	}
	token := secret
	if created {
		token = ""
	}
	if err := c.allow(r, c.Visitor(r), "", token); err != nil {
		return err
	}
	form, err := documents.ReadForm(r, c.DocumentBytes, false)
	if err != nil {
		return fileError(err)
	}
	caller := (&UserMessage{Owner: c.Visitor(r), Secret: secret}).principal()
	u := form.Upload
	u.By, u.TraceID = caller, string(id)
	if name := r.Header.Get(threadHeader); name != "" {
		thread, known, err := threads.Resolve(r.Context(), c.Front, caller, name)
		if err != nil {
			return threadError(err)
		}
		if known {
			u.ThreadID = thread
		}
	}
	var d documents.Document
	err = c.keyedTx.Do(r.Context(), c.Front, "documents of "+caller.Owner+" "+caller.Proof, func(tx pgx.Tx) (err error) {
		d, err = documents.Add(r.Context(), tx, u)
		return err
	})
	if err != nil {
		return fileError(err)
	}
	if created {
		w.Header().Set(visitorHeader, secret)
	}
	resp := newFile(d)
	resp.Purpose = form.Fields["purpose"]
	return writeFileJSON(w, resp)
}

// fileError converts an error of a document to a *Refusal for the visitor.
func fileError(err error) error {
	r := badRequest("file", "invalid_file", "%s.", err)
	switch {
	case errors.Is(err, documents.ErrTooLarge):
		r.Status, r.Code = http.StatusRequestEntityTooLarge, "file_too_large"
	case errors.Is(err, documents.ErrTooMany):
		r.Status, r.Code = http.StatusConflict, "too_many_files"
	case errors.Is(err, documents.ErrInUse):
		r.Status, r.Code, r.Param = http.StatusConflict, "file_in_use", "file_id"
	case errors.Is(err, documents.ErrNotFound):
		return notFound("file_not_found", "There is no such file.")
	case !errors.Is(err, documents.ErrForm) && !errors.Is(err, documents.ErrEmpty):
		return threadError(err)
	}
	return r
}

// hasLongDocument reports whether the model reads only the start of a document in the conversation.
func (p conversation) hasLongDocument() bool {
	return slices.ContainsFunc(p.messages,
		func(m models.Message) bool { return strings.Contains(m.Content, documents.TruncatedPrefix) })
}

// attachFiles attaches the files of the messages to the thread and stores the included ones. texts are the messages
// with the part of each file that the model reads; docs are the documents of each message.
func (c *Chat) attachFiles(
	ctx context.Context, tx pgx.Tx, a *UserMessage,
) (texts []string, docs [][]documents.Document, err error) {
	texts, docs = slices.Clone(a.Texts), make([][]documents.Document, len(a.Texts))
	for i, files := range a.Files {
		for _, f := range files {
			d, err := c.attachFile(ctx, tx, a, f)
			if err != nil {
				return nil, nil, fileError(err)
			}
			shown, err := documents.Render(ctx, tx, d, maxExcerpt)
			if err != nil {
				return nil, nil, err
			}
			texts[i] = strings.TrimSpace(texts[i] + "\n\n" + shown)
			docs[i] = append(docs[i], d)
		}
	}
	return texts, docs, nil
}

func documentIDs(docs [][]documents.Document) (ids []string) {
	for _, d := range slices.Concat(docs...) {
		ids = append(ids, d.ID)
	}
	return ids
}

// collectImages returns the images of each message, including those among its files if the model takes images. Larger
// images are left out.
func (c *Chat) collectImages(
	ctx context.Context, tx pgx.Tx, a *UserMessage, docs [][]documents.Document,
) ([][]threads.Image, error) {
	images := make([][]threads.Image, len(a.Texts))
	copy(images, a.Images)
	if !c.agentTakesImages(a) {
		return images, nil
	}
	remaining := int64(maxImageBytes)
	for i, list := range docs {
		for _, d := range list {
			if !slices.Contains(imageTypes(), d.ContentType) || len(images[i]) >= threads.MaxImages ||
				d.Size > min(remaining, threads.MaxImageSize) {
				continue
			}
			data, err := documents.Content(ctx, tx, d.ID)
			if err != nil {
				return nil, err
			}
			remaining -= d.Size
			images[i] = append(slices.Clip(images[i]), threads.Image{MediaType: d.ContentType, Data: data})
		}
	}
	return images, nil
}

// attachFile attaches a document to the thread, or stores the included file there.
func (c *Chat) attachFile(ctx context.Context, tx pgx.Tx, a *UserMessage, f File) (documents.Document, error) {
	if f.ID != "" {
		return documents.Attach(ctx, tx, a.principal(), a.thread, f.ID)
	}
	return documents.AddOnce(ctx, tx, documents.Upload{
		Name: f.Name, ContentType: f.ContentType, Content: f.Content, ThreadID: a.thread, TraceID: string(a.TraceID),
		By: a.principal(), MaxBytes: c.DocumentBytes,
	})
}

// File is a file of a message: the id of a document, or its content.
type File struct {
	ID          string
	Name        string
	ContentType string // as the client claims
	Content     []byte
}

// filePart is the file of a content part: its member file in chat completions, the part itself in responses.
type filePart struct {
	FileID   string `json:"file_id"`
	Data     string `json:"file_data"` // base64, or a data: URL of base64
	Filename string `json:"filename"`
}

func (p wirePart) file() filePart {
	if p.Type == "file" {
		return p.File
	}
	return filePart{FileID: p.FileID, Data: p.Data, Filename: p.Filename}
}

// check returns the problem of a part; "" for none.
func (p filePart) check() string {
	switch {
	case p.FileID == "" && p.Data == "":
		return "A file comes by its id, which POST /v1/files gives, or as file_data, with a filename."
	case p.FileID != "" && p.Data != "":
		return "A file has a file_id or file_data, not both."
	}
	return ""
}

// read decodes the file of a part. It refuses files above limit bytes.
func (p filePart) read(limit int64) (File, error) {
	if p.FileID != "" {
		return File{ID: p.FileID}, nil
	}
	f, encoded := File{Name: p.Filename}, p.Data
	if rest, isURL := strings.CutPrefix(p.Data, "data:"); isURL {
		head, body, _ := strings.Cut(rest, ",")
		kind, isBase64 := strings.CutSuffix(head, ";base64")
		if !isBase64 {
			return f, badRequest("file", "invalid_file", "file_data has the form data:application/pdf;base64,…")
		}
		encoded, f.ContentType = body, kind
	}
	if int64(base64.StdEncoding.DecodedLen(len(encoded))) > limit+2 {
		return f, documents.TooLarge(limit)
	}
	var err error
	if f.Content, err = base64.StdEncoding.DecodeString(encoded); err != nil {
		return f, badRequest("file", "invalid_file", "file_data must be base64.")
	}
	switch {
	case len(f.Content) == 0:
		return f, documents.ErrEmpty
	case int64(len(f.Content)) > limit:
		return f, documents.TooLarge(limit)
	}
	return f, nil
}

// readFiles decodes the files of a new message. param names the message in errors.
func (c *Chat) readFiles(parts []filePart, param string) (files []File, err error) {
	if len(parts) > maxFiles {
		return nil, badRequest(param, "too_many_files", "A message has at most %d files.", maxFiles)
	}
	for _, p := range parts {
		f, err := p.read(c.DocumentBytes)
		if err != nil {
			return nil, fileError(err)
		}
		files = append(files, f)
	}
	return files, nil
}

// filePurpose is the purpose of every file: purposes are not stored.
const filePurpose = "user_data"

// maxListedFiles bounds a page of files; OpenAI's bound is the same.
const maxListedFiles = 10_000

// file is OpenAI's file object.
type file struct {
	ID       string `json:"id"`
	Object   string `json:"object"`
	Bytes    int64  `json:"bytes"`
	Created  int64  `json:"created_at"`
	Expires  *int64 `json:"expires_at,omitempty"` // of an upload that no message uses
	Filename string `json:"filename"`
	Purpose  string `json:"purpose"`
	Status   string `json:"status"`
}

// newFile converts a document to a file object.
func newFile(d documents.Document) file {
	f := file{
		ID: d.ID, Object: "file", Bytes: d.Size, Created: d.CreatedAt.Unix(), Filename: d.Name, Purpose: filePurpose,
		Status: "processed",
	}
	if d.ExpiresAt != nil {
		at := d.ExpiresAt.Unix()
		f.Expires = &at
	}
	return f
}

// filePage is OpenAI's list of files.
type filePage struct {
	Object  string  `json:"object"`
	Data    []file  `json:"data"`
	FirstID *string `json:"first_id"`
	LastID  *string `json:"last_id"`
	HasMore bool    `json:"has_more"`
}

// FileListHandler serves GET /v1/files: the caller's files.
func (c *Chat) FileListHandler() http.Handler { return c.handler(c.listFiles) }

// FileHandler serves GET /v1/files/{id}.
func (c *Chat) FileHandler() http.Handler { return c.handler(c.getFile) }

// FileContentHandler serves GET /v1/files/{id}/content.
func (c *Chat) FileContentHandler() http.Handler { return c.handler(c.sendFile) }

// DeleteFileHandler serves DELETE /v1/files/{id}. A file that a message or a flow uses stays: 409.
func (c *Chat) DeleteFileHandler() http.Handler { return c.handler(c.deleteFile) }

func (c *Chat) listFiles(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	caller, err := c.principal(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	limit, order := maxListedFiles, query.Get("order")
	if raw := query.Get("limit"); raw != "" {
		if limit, err = strconv.Atoi(raw); err != nil || limit < 1 || limit > maxListedFiles {
			return badRequest("limit", "invalid_value", "limit is a number from 1 to %d.", maxListedFiles)
		}
	}
	switch {
	case order != "" && order != "asc" && order != "desc":
		return badRequest("order", "invalid_value", "order must be asc or desc.")
	case query.Get("purpose") != "" && query.Get("purpose") != filePurpose:
		return badRequest("purpose", "unsupported_value", "Purposes are not stored: each file is %s.", filePurpose)
	}
	docs, err := documents.ListOwn(r.Context(), c.Front, caller, query.Get("after"), order == "asc", limit+1)
	if err != nil {
		return err
	}
	page := filePage{Object: "list", Data: []file{}, HasMore: len(docs) > limit}
	for _, d := range docs[:min(len(docs), limit)] {
		page.Data = append(page.Data, newFile(d))
	}
	if n := len(page.Data); n > 0 {
		page.FirstID, page.LastID = &page.Data[0].ID, &page.Data[n-1].ID
	}
	return writeFileJSON(w, page)
}

func (c *Chat) getFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	d, err := c.ownFile(r)
	if err != nil {
		return err
	}
	return writeFileJSON(w, newFile(d))
}

func (c *Chat) sendFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	d, err := c.ownFile(r)
	if err != nil {
		return err
	}
	content, err := documents.Content(r.Context(), c.Front, d.ID)
	if err != nil {
		return fileError(err)
	}
	if err := documents.WriteAttachment(w, d, content); err != nil {
		c.Logger.DebugContext(r.Context(), "answer not sent", "error", err)
	}
	return nil
}

func (c *Chat) deleteFile(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	caller, err := c.principal(r)
	if err != nil {
		return err
	}
	id := r.PathValue("id")
	err = c.keyedTx.Do(r.Context(), c.Front, "documents of "+caller.Owner+" "+caller.Proof, func(tx pgx.Tx) error {
		d, err := documents.DeleteOwn(r.Context(), tx, caller, id)
		id = d.ID
		return err
	})
	if err != nil {
		return fileError(err)
	}
	return writeFileJSON(w, map[string]any{"id": id, "object": "file", "deleted": true})
}

// ownFile returns the caller's document of the request's path.
func (c *Chat) ownFile(r *http.Request) (documents.Document, error) {
	caller, err := c.principal(r)
	if err != nil {
		return documents.Document{}, err
	}
	d, err := documents.GetOwn(r.Context(), c.Front, caller, r.PathValue("id"))
	if err != nil {
		return d, fileError(err)
	}
	return d, nil
}

func writeFileJSON(w http.ResponseWriter, answer any) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(answer)
}

// wirePart is a part of a message's content, in either protocol. image_url is an object in chat completions and a text
// in responses.
type wirePart struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	Refusal string          `json:"refusal"`
	Image   json.RawMessage `json:"image_url"`
	FileID  string          `json:"file_id"`
	Detail  string          `json:"detail"`

	Data     string   `json:"file_data"`
	Filename string   `json:"filename"`
	File     filePart `json:"file"`
}

// image reads an image of a request. Its errors are for the client.
func (p wirePart) image() (threads.Image, error) {
	if p.FileID != "" {
		return threads.Image{}, fmt.Errorf("files are not stored here: send the image's https URL, or the image as a " +
			"data: URL")
	}
	imageURL, ok := text(p.Image)
	if !ok {
		var inner struct {
			URL    string `json:"url"`
			Detail string `json:"detail"`
		}
		if json.Unmarshal(p.Image, &inner) != nil {
			return threads.Image{}, fmt.Errorf("image_url must be a URL, or an object with url")
		}
		imageURL, p.Detail = inner.URL, inner.Detail
	}
	if !slices.Contains([]string{"", "low", "high", "auto"}, p.Detail) {
		return threads.Image{}, fmt.Errorf("detail must be low, high or auto")
	}
	if rest, isDataURL := strings.CutPrefix(imageURL, "data:"); isDataURL {
		return decodeDataURL(rest, p.Detail)
	}
	u, err := url.Parse(imageURL)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil:
		return threads.Image{}, fmt.Errorf("an image is an https URL, or a data: URL with the image in it")
	case len(imageURL) > threads.MaxImageURL || strings.ContainsFunc(imageURL, unprintable):
		return threads.Image{}, fmt.Errorf("an image's URL has at most %d printable characters", threads.MaxImageURL)
	}
	return threads.Image{URL: "https" + imageURL[len("https"):], Detail: p.Detail}, nil
}

func unprintable(r rune) bool { return r <= ' ' || r == 0x7f }

// decodeDataURL decodes the image of a data: URL, without the prefix. It checks the media type against the bytes.
func decodeDataURL(rest, detail string) (threads.Image, error) {
	kind, encoded, ok := strings.Cut(rest, ";base64,")
	if !ok {
		return threads.Image{}, fmt.Errorf("a data: URL has the form data:image/png;base64,…")
	}
	if base64.StdEncoding.DecodedLen(len(encoded)) > threads.MaxImageSize+2 {
		return threads.Image{}, fmt.Errorf("an image has at most %d bytes", threads.MaxImageSize)
	}
	data, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return threads.Image{}, fmt.Errorf("the data of a data: URL must be base64")
	}
	mediaType := http.DetectContentType(data)
	switch {
	case len(data) > threads.MaxImageSize:
		return threads.Image{}, fmt.Errorf("an image has at most %d bytes", threads.MaxImageSize)
	case !slices.Contains(imageTypes(), mediaType):
		return threads.Image{}, fmt.Errorf("an image is png, jpeg, gif or webp, and this is none")
	case kind != mediaType && (kind != "image/jpg" || mediaType != "image/jpeg"):
		return threads.Image{}, fmt.Errorf("the data: URL says %s, and its data is %s", truncate(kind, 40), mediaType)
	}
	return threads.Image{MediaType: mediaType, Data: data, Detail: detail}, nil
}

// imageTypes are the media types of images that models take.
func imageTypes() []string { return []string{"image/png", "image/jpeg", "image/gif", "image/webp"} }

// agentTakesImages reports whether the agent's model takes images.
func (c *Chat) agentTakesImages(a *UserMessage) bool {
	return c.Loop.Model.SupportsImages(cmp.Or(a.agent.Model, c.Loop.Model.Model()))
}

// checkImages refuses images if the agent's model takes none.
func (c *Chat) checkImages(a *UserMessage) error {
	if len(slices.Concat(a.Images...)) == 0 && !slices.ContainsFunc(a.Earlier,
		func(l Line) bool { return len(l.Images) > 0 }) {
		return nil
	}
	if c.agentTakesImages(a) {
		return nil
	}
	return badRequest("messages", "image_not_supported", "The model of %s takes no images: send the message without them.",
		a.Model)
}

// loadImages returns the images of messages as the model reads them, by message id.
func (c *Chat) loadImages(ctx context.Context, messages []threads.Message) (map[string][]models.Part, error) {
	byMessage, err := threads.Images(ctx, c.Pool, messages)
	parts := make(map[string][]models.Part, len(byMessage))
	for id, list := range byMessage {
		for _, image := range list {
			parts[id] = append(parts[id], image.Part())
		}
	}
	return parts, err
}
