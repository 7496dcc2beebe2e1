package documents

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
)

// FormOverhead is what a form may have beside the file, in bytes.
const FormOverhead = 64 << 10

// ErrForm reports a body that is neither a form with a file nor a file.
var ErrForm = errors.New("the body has no file")

// Form is an upload by HTTP: its file, and the other fields of its form.
type Form struct {
	Upload
	Fields map[string]string
}

// ReadForm reads the body of an upload: a form (multipart/form-data) with one part named file. Any other content type
// is the file itself, where raw says so; it has no name. [ErrForm] and [ErrTooLarge] refuse it.
func ReadForm(r *http.Request, most int64, raw bool) (Form, error) {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	f := Form{Upload: Upload{ContentType: kind, MaxBytes: most}, Fields: map[string]string{}}
	switch {
	case err == nil && kind == "multipart/form-data" && params["boundary"] != "":
		return f, f.parts(multipart.NewReader(r.Body, params["boundary"]))
	case raw && (err != nil || kind != "multipart/form-data"):
		f.Content, err = bounded(r.Body, most)
		return f, err
	}
	return f, fmt.Errorf("%w: send multipart/form-data with a part named file, of at most %d bytes", ErrForm, most)
}

// parts reads the parts of a form.
func (f *Form) parts(form *multipart.Reader) error {
	for found := false; ; {
		part, err := form.NextPart()
		switch {
		case errors.Is(err, io.EOF) && found:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: the form has no part named file", ErrForm)
		case err != nil:
			return fmt.Errorf("%w: %w", ErrForm, err)
		case part.FormName() == "file" && found:
			return fmt.Errorf("%w: the form has two parts named file", ErrForm)
		case part.FormName() == "file":
			found = true
			f.Name, f.ContentType = fileName(part), part.Header.Get("Content-Type")
			if f.Content, err = bounded(part, f.MaxBytes); err != nil {
				return err
			}
			continue
		}
		value, err := bounded(part, FormOverhead)
		if err != nil {
			return fmt.Errorf("%w: the field %.40q is too long", ErrForm, part.FormName())
		}
		f.Fields[part.FormName()] = string(value)
	}
}

// fileName is the file name of a part. Browsers escape quotes in it as in a URL.
func fileName(part *multipart.Part) string {
	name := part.FileName()
	if plain, err := url.PathUnescape(name); err == nil {
		return plain
	}
	return name
}

// bounded reads at most so many bytes.
func bounded(from io.Reader, most int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(from, most+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrForm, err)
	case int64(len(content)) > most:
		return nil, TooLarge(most)
	}
	return content, nil
}
